"""streamrl pause"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import fail, out, plain_errors

NO_SERVER = "no Prefect server answers (`streamrl up` starts one, PREFECT_API_URL names another)"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(pause))


def pause(run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")]) -> None:
    """Pause a run that is a flow run: generation and training stop, and nothing is lost.

    A run that a worker started ends its process too, and frees the machine. One of a terminal waits there.

    Example: [bold]streamrl pause count-3[/bold], later [bold]streamrl unpause count-3[/bold]
    """
    use_server()
    from flows.flow_runs.pausing import pause_run

    ends = pause_run(run)
    rest = "and its flow run's process" if ends else "and its terminal waits"
    out().print(f"run {run} is paused: its processes end within seconds, {rest}", highlight=False)
    out().print(f"go on with it: streamrl unpause {run}", highlight=False)


def use_server() -> None:
    """Have Prefect, which is imported later, use the server of a run. Exits if there is none."""
    import os

    from flows.cli.shared.running import prefect_environment

    env = prefect_environment()
    if not env:
        fail(NO_SERVER)
    os.environ.update(env)
