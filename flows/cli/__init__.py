"""The command line `streamrl`. Each file here is a command; installed packages may bring more.

The file of a command has `add_to(app)`. A package names such a function as an entry point of the group
`streamrl.commands`. Heavy modules are imported where they are used.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from schemas.importing import said

GROUP = "streamrl.commands"
_FIRST = (
    "init", "up", "run", "runs", "status", "samples", "inspect", "sql", "report", "logs", "stop", "pause",
    "unpause", "join", "rebalance", "deploy", "profile", "plan", "simulate", "explain", "bisect", "replay",
    "bundle", "fork", "what_if", "skip", "export", "quantize", "archive", "weights", "ranker", "rm", "demo",
    "down", "doctor", "schema",
)  # fmt: skip

app = typer.Typer(
    name="streamrl",
    help="Reinforcement learning for language models: vLLM generators → Kafka → a torch trainer.\n\n"
    "Start here: [bold]streamrl doctor[/bold] looks at this machine, [bold]streamrl demo[/bold] shows "
    "a whole run, [bold]streamrl init[/bold] writes a first one of yours.",
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


def _own_commands() -> Iterator[Callable[[typer.Typer], None]]:
    names = {found.name for found in pkgutil.iter_modules(__path__) if not found.ispkg} - {"__main__"}
    for name in [*(one for one in _FIRST if one in names), *sorted(names - set(_FIRST))]:
        yield importlib.import_module(f"{__name__}.{name}").add_to


def _names(of: typer.Typer, since: tuple[list[Any], list[Any]] = ([], [])) -> set[str]:
    commands = [one for one in of.registered_commands if one not in since[0]]
    groups = [one for one in of.registered_groups if one not in since[1]]
    return {one.name or one.callback.__name__ for one in commands if one.callback} | {
        str(one.name or one.typer_instance.info.name) for one in groups if one.typer_instance
    }


def add_installed_commands(into: typer.Typer) -> None:
    """Add the commands of installed packages. One that can't be loaded is named, and left out."""
    for point in entry_points(group=GROUP):
        before = list(into.registered_commands), list(into.registered_groups)
        taken = _names(into)
        try:
            point.load()(into)
            if double := taken & _names(into, since=before):
                raise ValueError(f"there is a command {', '.join(sorted(double))} already")
        except (Exception, SystemExit) as error:
            into.registered_commands, into.registered_groups = before
            typer.echo(f"the command {point.name} ({point.value}) can't be loaded: {said(error)}", err=True)


for add in _own_commands():
    add(app)


def main() -> None:
    """Run the command line."""
    add_installed_commands(app)
    app(prog_name="streamrl")
