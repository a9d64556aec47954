"""streamrl rm"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import INTERRUPTED, each_run, fail, out, plain_errors, sigterm_interrupts

if TYPE_CHECKING:
    from infra.stores.store import Store


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(rm))


def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of runs, such as count-1.")],
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
    """Remove runs that have ended: their topics, and their objects in the store. There is no way back.

    Example: [bold]streamrl rm count-1 count-2[/bold]
    """
    from flows.run.locations import named_store

    opened = named_store(store)
    each_run(dict.fromkeys(runs), lambda run: _rm(run, opened, yes=yes, report=report, topics=topics))


def _rm(run: str, opened: Store, *, yes: bool, report: bool, topics: bool) -> None:
    from flows.run.locations import named_as
    from flows.run.removing import remains, remove
    from flows.run.suggested_commands import SuggestedCommands
    from infra.run_bus import connect

    console = out()
    open_bus = (lambda record: connect(record, "streamrl-rm")) if topics else None
    with console.status(f"looking for run {run}") as shown:
        found = remains(opened, run, open_bus, shown.update)
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
    more = [*(["--report"] if report else []), *([] if topics else ["--no-topics"])]
    again = SuggestedCommands(run, named_as(opened.url)).command("rm", *more)
    _remove(lambda progress: remove(opened, found, open_bus, report=report, progress=progress), again)
    console.print(f"run {run} is gone: {what}", markup=False, highlight=False, soft_wrap=True)
    if found.report and not report:
        console.print(f"its report stays: {found.report}", markup=False, highlight=False, soft_wrap=True)


def _remove(work: Callable[[Callable[[int, int], None]], None], again: str) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("removing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    try:
        with sigterm_interrupts(), Progress(*columns, console=out(), transient=True) as bar:
            task = bar.add_task("", total=None)
            work(lambda done, whole: bar.update(task, completed=done, total=whole))
    except KeyboardInterrupt:
        fail(f"stopped half way: `{again}` goes on with it", INTERRUPTED)
