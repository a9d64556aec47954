"""streamrl runs"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import out, plain_errors, say_json

if TYPE_CHECKING:
    from flows.run.run_state import RunState

_STYLES = {"ended": "green", "failed": "red", "silent": "red", "interrupted": "yellow"}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(runs))


def runs(
    store: Annotated[str, typer.Option("--store", help="The object store of the runs.")] = "local",
    most: Annotated[int, typer.Option("--number", "-n", min=1, help="How many of the newest.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, of all runs.")] = False,
) -> None:
    """List the runs of a store, newest first: state, iterations, reward, and when they were started.

    `silent` is a run whose flow was killed, or whose machine is gone: it can be resumed.

    Example: [bold]streamrl runs --store s3://streamrl/runs[/bold]
    """

    from rich.markup import escape
    from rich.table import Table

    from flows.run.locations import named_store
    from flows.run.run_state import SILENT_NOTE, read_states

    opened, console = named_store(store), out()
    found = read_states(opened)
    if as_json:
        for run, state in found.items():
            say_json({"run": run, **({"now": state.now, **state.model_dump()} if state else {})})
        return
    if not found:
        console.print(f"there are no runs in {opened.url}", highlight=False, soft_wrap=True)
        return
    table = Table(
        "run", "state", "iteration", "reward", "started", "last heard", "on", box=None, pad_edge=False
    )
    shown = list(found.items())[:most]
    for run, state in shown:
        of = f" (fork of {state.fork})" if state and state.fork else ""
        table.add_row(escape(f"{run}{of}"), *_cells(state))
    console.print(table)
    if any(state and state.now == "silent" for _, state in shown):
        console.print(SILENT_NOTE, style="dim", highlight=False, soft_wrap=True)
    if len(found) > most:
        console.print(f"{len(found) - most} older; -n {len(found)} shows all", style="dim", highlight=False)


def _cells(state: RunState | None) -> list[str]:
    from rich.markup import escape

    from flows.view.live import ago, number
    from schemas.shortening import printable

    if state is None:
        return ["–"] * 6
    style = _STYLES.get(state.now, "")
    done = 0 if state.iteration is None else state.iteration + 1
    return [
        f"[{style}]{state.now}[/{style}]" if style else state.now, f"{done} of {state.iterations}",
        number(state.reward, 3), ago(state.started_at), ago(state.at), escape(printable(state.host, 40)),
    ]  # fmt: skip
