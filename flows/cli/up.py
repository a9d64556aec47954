"""streamrl up"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import out, plain_errors, sigterm_interrupts


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(up))


def up(
    s3: Annotated[
        bool, typer.Option("--s3", help="Also run an S3 server (versitygw) on a local folder.")
    ] = False,
    prefect: Annotated[bool, typer.Option("--prefect/--no-prefect", help="Run a Prefect server.")] = True,
) -> None:
    """Start what runs need on this machine: Apache Kafka and a Prefect server.

    Services stay until [bold]streamrl down[/bold]; one that runs is left alone. Data lies in .streamrl/.

    Example: [bold]streamrl up --s3[/bold]
    """
    from flows.cli.shared.prefect_setup import prepare_server
    from infra.stack import local

    console = out()
    with sigterm_interrupts():
        stack = local.start_stack(
            kafka=True, s3=s3, prefect=prefect,
            progress=lambda name, text: console.print(f"[dim]{name}[/dim] {text}", highlight=False),
        )  # fmt: skip
    console.print(f"home     {stack.paths.home}", highlight=False, soft_wrap=True)
    console.print(f"Kafka    {stack.bootstrap_servers}", highlight=False)
    if stack.prefect_api_url:
        prepare_server(stack.prefect_api_url)
        console.print(f"Prefect  {stack.prefect_api_url.removesuffix('/api')}", highlight=False)
        console.print(
            f"         for its own command: export PREFECT_API_URL={stack.prefect_api_url}", highlight=False
        )
    if stack.s3:
        console.print(f"S3       {stack.s3.endpoint_url}  bucket {stack.s3.bucket}", highlight=False)
        console.print(f"         in a run file: placement.store: {stack.s3.url}/some/folder", highlight=False)
