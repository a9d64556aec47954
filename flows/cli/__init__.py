"""The command line `streamrl`, a file for each command. Heavy modules are imported where they are used."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli import (  # fmt: skip
    demo,
    doctor,
    down,
    export,
    join,
    logs,
    ranker,
    replay,
    rm,
    run,
    schema,
    skip,
    status,
    up,
    weights,
)

app = typer.Typer(
    name="streamrl",
    help="Reinforcement learning for language models: vLLM generators → Kafka → a torch trainer.\n\n"
    "Start here: [bold]streamrl doctor[/bold] looks at this machine, [bold]streamrl demo[/bold] shows "
    "a whole run, [bold]streamrl run FILE[/bold] does yours.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(asked: bool) -> None:
    if asked:
        from streamrl import __version__

        typer.echo(f"streamrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Handle the options before a command."""


_COMMANDS = up, run, join, status, logs, replay, skip, export, weights, ranker, rm, demo, down, doctor, schema
for command in _COMMANDS:
    command.add_to(app)


def main() -> None:
    """Run the command line."""
    app(prog_name="streamrl")
