"""streamrl archive"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.shared.talk import (
    INTERRUPTED,
    each_run,
    error_console,
    fail,
    out,
    plain_errors,
    say_json,
    sigterm_interrupts,
    warn,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(plain_errors(archive))


def archive(
    runs: Annotated[list[str], typer.Argument(help="Ids of runs, such as count-1.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run.")] = False,
    store: Annotated[str, typer.Option("--store", help="The runs' object store.")] = "local",
) -> None:
    """Archive what runs have recorded since the last time, as Parquet in the object store.

    Replays, resumes, offline runs, `streamrl ranker` and `streamrl sql` read archive and log as one, so they
    work on when Kafka's retention has removed records. Call it more often than that, or write
    `placement: {archive: {}}` into the run file. It may be stopped at any time, and goes on where it was.

    Examples:

    [bold]streamrl archive count-3[/bold]

    [bold]streamrl archive count-3 count-4 --store s3://bucket/store --json[/bold]
    """
    from functools import partial

    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from flows.run.archiving import archive_now, lost_in_words, pass_in_words

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()

    def archive_one(run: str) -> None:
        try:
            with sigterm_interrupts(), Progress(*columns, console=error_console(), transient=True) as bar:
                task = bar.add_task(f"records of {run}", total=None)
                progress = partial(_show, bar, task)
                done = archive_now(run, store, progress)
        except KeyboardInterrupt:
            fail("stopped; what is archived so far stays", INTERRUPTED)
        if lost := lost_in_words(run, done):
            warn(lost)
        if as_json:
            said = {
                "run": run, "records": done.records, "log_bytes": done.log_bytes,
                "archive_bytes": done.file_bytes, "segments": done.segments, "lost": done.lost,
                "unreadable": done.unreadable,
            }  # fmt: skip
            say_json(said)
        else:
            out().print(pass_in_words(run, done), markup=False, highlight=False, soft_wrap=True)

    each_run(runs, archive_one)


def _show(bar: Progress, task: TaskID, done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)
