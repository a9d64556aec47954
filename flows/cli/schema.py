"""streamrl schema"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from flows.cli.shared.talk import plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(schema))


def schema(
    markdown: Annotated[bool, typer.Option("--markdown", help="The page for people instead.")] = False,
) -> None:
    """Print the JSON schema of run files: editors complete and check with it.

    Example: [bold]streamrl schema > run.schema.json[/bold], and as the first line of a run file:
    [bold]# yaml-language-server: $schema=run.schema.json[/bold]
    """
    from schemas import loading, reference

    typer.echo(reference.reference_page() if markdown else json.dumps(loading.json_schema(), indent=1))
