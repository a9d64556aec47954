"""streamrl unpause"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.pause import use_server
from flows.cli.shared.talk import out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(unpause))


def unpause(run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")]) -> None:
    """Go on with a run that was paused, from where it was.

    Example: [bold]streamrl unpause count-3[/bold]
    """
    use_server()
    from flows.flow_runs.pausing import unpause_run

    suspended = unpause_run(run)
    how = "as soon as a worker takes it" if suspended else "in its terminal"
    out().print(f"run {run} goes on {how}", highlight=False)
