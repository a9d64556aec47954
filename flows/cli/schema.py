"""streamrl schema"""

from __future__ import annotations

import json

import typer

from flows.cli.talk import plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(schema))


def schema() -> None:
    """Print the JSON schema of run files: editors complete and check with it.

    Example: [bold]streamrl schema > run.schema.json[/bold], and as the first line of a run file:
    [bold]# yaml-language-server: $schema=run.schema.json[/bold]
    """
    from schemas.loading import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))
