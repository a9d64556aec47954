"""Options and output that `plan` and `simulate` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import error_console

if TYPE_CHECKING:
    from rich.console import Console

PlannedRunFile = Annotated[str, typer.Argument(help="The run file, such as examples/count.yaml.")]
PlannedChanges = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting; may be repeated.")
]
MeasuredProfile = Annotated[
    Path | None, typer.Option("--profile", help="Measured times, as `streamrl profile` writes them.")
]
MeanLength = Annotated[
    float | None, typer.Option("--mean-length", metavar="N", help="Tokens of an answer, on average.")
]
AllFigures = Annotated[bool, typer.Option("--json", help="One JSON object with all figures.")]


def say_line(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say_drawn(picture: Path | None) -> None:
    """Say where the picture is, if there is one."""
    if picture is not None:
        say_line(error_console(), f"drawn into {picture}")
