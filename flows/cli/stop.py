"""streamrl stop"""

from __future__ import annotations

import time
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
    from flows.run.run_state import (
        HEARD_WITHIN_S,
        ask_to_stop,
        is_heard_again,
        read_state,
        wait_until_stopped,
    )
    from flows.view.live import ago
    from infra.runs import find

    opened, console = named_store(store), out()
    find(opened, run)
    state = read_state(opened, run)
    if state is not None and not state.is_active:
        console.print(f"run {run} does not go on: {state.now}", highlight=False, soft_wrap=True)
        return
    # By the clocks of two machines a run that lives may look silent too: it is asked, and then listened to.
    silent = state if state is not None and state.now == "silent" else None
    ask_to_stop(opened, run)
    if not wait_s:
        doubt = f". It was last heard {ago(silent.at)}: look whether it lives" if silent else ""
        console.print(f"run {run} is asked to stop{doubt}", highlight=False, soft_wrap=True)
        return
    until = time.monotonic() + wait_s
    with console.status(f"run {run} is asked to stop") as shown:
        listen_s = min(HEARD_WITHIN_S, wait_s)
        heard = silent is None or is_heard_again(opened, run, silent, listen_s, shown.update)
        if silent is not None and not heard and wait_s >= HEARD_WITHIN_S:
            fail(
                f"run {run} was last heard {ago(silent.at)}, and not in the last {HEARD_WITHIN_S:g} s: its "
                f"flow, process {silent.pid} on {silent.host}, is gone, and its processes with it. "
                f"To {silent.go_on}", FAILED,
            )  # fmt: skip
        ended = wait_until_stopped(opened, run, max(0.0, until - time.monotonic()), shown.update)
    if ended is None:
        where = f"process {state.pid} on {state.host}" if state else "the process that started it"
        fail(
            f"run {run} has not ended within {wait_s:g} s. Its flow is {where}: look whether it lives", FAILED
        )
    advice = f". To {ended.go_on}" if ended.go_on else ""
    console.print(f"run {run}: {ended.state}{advice}", markup=False, highlight=False, soft_wrap=True)
