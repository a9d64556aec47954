"""streamrl rm"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from flows.cli.shared.talk import INTERRUPTED, fail, out, plain_errors, sigterm_interrupts


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(rm))


def rm(
    run: Annotated[str, typer.Argument(help="The run's id, such as count-1.")],
    store: Annotated[
        str, typer.Option("--store", help="The run's object store, such as s3://bucket/folder.")
    ] = "local",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Its report folder on this machine too, with logs and model.")
    ] = False,
    topics: Annotated[
        bool, typer.Option("--topics/--no-topics", help="Leave its topics: when its broker is gone for good.")
    ] = True,
) -> None:
    """Remove a run that has ended: its topics, and its objects in the store. There is no way back.

    Example: [bold]streamrl rm count-1[/bold]
    """
    from flows.run.locations import store_url
    from flows.run.removing import remains, remove
    from infra.run_bus import connect
    from infra.stores.opening import open_store

    console, opened = out(), open_store(store_url(store))
    open_bus = (lambda record: connect(record, "streamrl-rm")) if topics else None
    found = remains(opened, run, open_bus)
    if found.foreign:
        console.print(
            f"the topics {run}.* stay: they are those of the run {run} in {found.foreign}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    if not found:
        console.print(f"there is nothing of run {run} in {opened.url}", highlight=False, soft_wrap=True)
        return
    what = f"{len(found.topics)} topics, {len(found.objects)} objects in {opened.url}"
    if report and found.report:
        what += f", and {found.report}"
    if not yes and not typer.confirm(f"Remove run {run}: {what}?"):
        fail("nothing was removed")
    _remove(lambda progress: remove(opened, found, open_bus, report=report, progress=progress), run)
    console.print(f"run {run} is gone: {what}", markup=False, highlight=False, soft_wrap=True)
    if found.report and not report:
        console.print(f"its report stays: {found.report}", markup=False, highlight=False, soft_wrap=True)


def _remove(work: Callable[[Callable[[int, int], None]], None], run: str) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("removing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with sigterm_interrupts(), Progress(*columns, console=out(), transient=True) as bar:
            task = bar.add_task("", total=None)
            work(lambda done, whole: bar.update(task, completed=done, total=whole))
    except KeyboardInterrupt:
        fail(f"stopped half way: `streamrl rm {run}` goes on with it", INTERRUPTED)
