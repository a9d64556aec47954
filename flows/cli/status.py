"""streamrl status"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import out, plain_errors, say_json

if TYPE_CHECKING:
    from rich.console import Console

    from flows.run.run_state import RunState
    from infra.runs import RunRecord
    from infra.stores.store import Store


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(status))


def status(
    run: Annotated[str | None, typer.Argument(help="The run's id; the newest if left out.")] = None,
    store: Annotated[str, typer.Option("--store", help="The run's object store.")] = "local",
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
) -> None:
    """Show the local services, and of a run: its processes, what waits in each length class, its last step.

    Example: [bold]streamrl status count-3[/bold]
    """
    if as_json:
        _as_json(run, store)
        return
    console = out()
    _services(console)
    _run(console, run, store)


def _as_json(run: str | None, store_name: str) -> None:
    import dataclasses

    from flows.run.locations import named_store
    from flows.run.run_state import read_state
    from flows.view.follow import look_once
    from infra.stack import local

    store = named_store(store_name)
    record = _record(store, run)
    found: dict[str, object] = {"services": [dataclasses.asdict(one) for one in local.stack_state()]}
    if record is not None:
        state, view = read_state(store, record.id), look_once(record)
        found |= {
            "run": record.id,
            "state": {"now": state.now, **state.model_dump()} if state else None,
            "fork": record.fork.words if record.fork else None,
            "view": view.as_json(),
        }
    say_json(found)


def _record(store: Store, run: str | None) -> RunRecord | None:
    from infra.runs import find, newest_run

    return newest_run(store) if run is None else find(store, run)


def _services(console: Console) -> None:
    import time

    from rich.table import Table

    from infra.stack import local
    from infra.stack.paths import StackPaths

    table = Table("service", "status", "where", "process", "memory", "since", box=None, pad_edge=False)
    for service in local.stack_state():
        table.add_row(
            service.name, service.status, service.url or "", str(service.pid or ""),
            f"{service.rss_bytes / 2**20:.0f} MiB" if service.rss_bytes else "",
            time.strftime("%H:%M", time.localtime(service.started_at)) if service.started_at else "",
        )  # fmt: skip
    console.print(table)
    console.print(f"their home: {StackPaths.locate().home}", style="dim", highlight=False, soft_wrap=True)


def _run(console: Console, run: str | None, store_name: str) -> None:
    from flows.run.locations import named_store
    from flows.run.run_state import read_state
    from flows.view.follow import look_once
    from flows.view.live import one_line, picture

    store = named_store(store_name)
    record = _record(store, run)
    if record is None:
        console.print(f"\nno runs in {store.url} yet", highlight=False, soft_wrap=True)
        return
    console.print()
    if record.fork is not None:
        console.print(f"a fork of {record.fork.words}", highlight=False, markup=False, soft_wrap=True)
    _state(console, read_state(store, record.id))
    view = look_once(record)
    console.print(picture(view))
    console.print(one_line(view), highlight=False, soft_wrap=True)


def _state(console: Console, state: RunState | None) -> None:
    """Say how a run stands, and of one that has ended: why, where its report is, and how to go on."""
    from flows.run.run_state import SILENT_NOTE
    from flows.view.live import ago
    from schemas.shortening import bounded

    if state is None:
        return
    lines = [
        f"run {state.run}: {state.now}, last heard {ago(state.at)} from process {state.pid} on {state.host}"
    ]
    if state.now == "silent":
        lines.append(SILENT_NOTE)
    if state.why:
        lines.append(bounded(state.why))
    if not state.is_active or state.now == "silent":
        lines.append(f"its report folder: {state.report}")
        if state.state != "ended" and state.go_on not in state.why:
            lines.append(state.go_on)
    style = "red" if state.now in ("failed", "silent") else None
    console.print("\n".join(lines), style=style, markup=False, highlight=False, soft_wrap=True)
