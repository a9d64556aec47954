"""streamrl demo"""

from __future__ import annotations

import typer

from flows.cli.shared.talk import out, plain_errors, sigterm_interrupts
from infra.code import EXAMPLES


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(demo))


def demo() -> None:
    """Do a whole small run: start what is needed, train, show the result, stop what was started.

    A small model learns to count down: first the model is made (a minute or two, once), then
    trained by examples/count.yaml.

    Example: [bold]streamrl demo[/bold]
    """
    from flows.cli.run import carry_out
    from flows.run.request import RunRequest
    from infra.stack import local

    console = out()
    before = {service.name for service in local.stack_state() if service.status == "running"}
    try:
        with sigterm_interrupts():
            local.start_stack(
                kafka=True, prefect=True,
                progress=lambda name, text: console.print(f"[dim]{name}[/dim] {text}", highlight=False),
            )  # fmt: skip
        carry_out(RunRequest(str(EXAMPLES / "count.yaml")), prefect=True)
    finally:
        if not before:
            local.stop_stack()
