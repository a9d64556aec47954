"""streamrl stop"""

from __future__ import annotations

from typing import Annotated

import typer

from flows.cli.shared.talk import FAILED, fail, out, plain_errors


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(stop))


def stop(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait until it has ended; 0: do not wait.")
    ] = 120.0,
) -> None:
    """Stop a run that goes on in another terminal, on another machine or as a deployment.

    It ends in order, as with Ctrl-C there: nothing is lost, and it can be resumed.

    Example: [bold]streamrl stop count-3[/bold]
    """
    from flows.run.locations import named_store
    from flows.run.run_state import ask_to_stop, read_state, wait_until_stopped
    from flows.view.live import ago
    from infra.runs import find

    opened, console = named_store(store), out()
    find(opened, run)
    state = read_state(opened, run)
    if state is not None and not state.is_active:
        console.print(f"run {run} does not go on: {state.now}", highlight=False, soft_wrap=True)
        return
    if state is not None and state.now == "silent":
        fail(
            f"run {run} was last heard {ago(state.at)}: its flow, process {state.pid} on {state.host}, is "
            f"gone, and its processes with it. To {state.go_on}", FAILED,
        )  # fmt: skip
    ask_to_stop(opened, run)
    if not wait_s:
        console.print(f"run {run} is asked to stop", highlight=False)
        return
    with console.status(f"run {run} is asked to stop") as shown:
        ended = wait_until_stopped(opened, run, wait_s, shown.update)
    if ended is None:
        where = f"process {state.pid} on {state.host}" if state else "the process that started it"
        fail(
            f"run {run} has not ended within {wait_s:g} s. Its flow is {where}: look whether it lives", FAILED
        )
    advice = f". To {ended.go_on}" if ended.go_on else ""
    console.print(f"run {run}: {ended.state}{advice}", markup=False, highlight=False, soft_wrap=True)
