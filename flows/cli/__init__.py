"""The command line `streamrl`: one file a command. What is heavy is imported when a command needs it."""

from __future__ import annotations

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

_COMMANDS = up, run, join, status, logs, replay, skip, export, weights, ranker, rm, demo, down, doctor, schema
for command in _COMMANDS:
    command.add_to(app)


def main() -> None:
    """The entry point."""
    app(prog_name="streamrl")
