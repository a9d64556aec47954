"""The page of a flow run: its log, how far the run is, its result, and links to the report."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from contextvars import copy_context
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.run.locations import report_folder
from flows.run.request import RunResult
from flows.view.live import number, one_line
from flows.view.run_view import RunView
from infra.background import Background
from infra.runs import RunRecord

ARTIFACT_EVERY_S = 10.0
_LAST_S = 10.0  # for the last state to be shown, before the flow run goes on
PAGE = "report.html"  # the report as one page, if it is in the report folder
_LONGEST_REASON = 2000


class PrefectScreen:
    """A screen that writes news to the flow run's log, and the state of the run to a progress artifact."""

    def __init__(self) -> None:
        self._log, self._bar = get_run_logger(), _Bar()
        self._next = 0.0

    def say(self, text: str) -> None:
        self._log.info("%s", text)

    def progress(self, fraction: float, text: str) -> None:
        if self._due():
            self._log.info("%3.0f%% %s", 100 * fraction, text)

    def show(self, view: RunView) -> None:
        percent = min(100.0, 100.0 * view.iterations_begun() / view.spec.algorithm.iterations)
        if not self._due() and (percent < 100.0 or self._bar.asked == percent):
            return
        self._log.info("%s", one_line(view))
        is_new = self._bar.asked != percent
        self._bar.show(view.run, percent, one_line(view))
        if percent == 100.0 and is_new:
            self._bar.wait(_LAST_S)

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + ARTIFACT_EVERY_S
        return True


class _Bar:
    """The progress artifact. A thread sends the newest state: a server that hangs holds up no run."""

    def __init__(self) -> None:
        self.asked = 0.0
        self._artifact: UUID | None = None
        self._newest: tuple[str, float, str] | None = None
        self._lock, self._sends = threading.Lock(), False
        self._sender: Background | None = None

    def show(self, run: str, percent: float, line: str) -> None:
        """Have a state shown soon. One that is still to be sent is left out."""
        with self._lock:
            self.asked, self._newest = percent, (run, percent, line)
            if self._sends:
                return
            self._sends = True
        here = copy_context()  # says which flow run it is
        self._sender = Background(lambda: here.run(self._send), "progress")
        self._sender.start()

    def wait(self, seconds: float) -> None:
        """Wait until all is sent, so long at most."""
        if self._sender is not None:
            self._sender.join(seconds)

    def _send(self) -> None:
        while (newest := self._taken()) is not None:
            run, percent, line = newest
            with suppress(Exception):  # the server may be busy or away
                if self._artifact is None:
                    key = f"{run}-progress"
                    self._artifact = _id(create_progress_artifact(percent, key=key, description=line))
                else:
                    update_progress_artifact(self._artifact, progress=percent, description=line)

    def _taken(self) -> tuple[str, float, str] | None:
        with self._lock:
            newest, self._newest = self._newest, None
            self._sends = newest is not None
            return newest


def _id(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(str(value))


def show_result_artifacts(result: RunResult) -> None:
    """Show a result: held-out rewards as a table, and all figures as a page."""
    with suppress(Exception):  # the run is done: an artifact that can't be made does not undo it
        if rows := result.summary["result"]:
            create_table_artifact(
                rows, key=f"{result.run}-result", description=f"Held-out reward of {result.run}"
            )
        create_markdown_artifact(
            result_page(result), key=f"{result.run}-report", description=f"Report of {result.run}"
        )


def show_failure(record: RunRecord, reason: str) -> None:
    """Show why a run ended before it was done, and where its logs are."""
    with suppress(Exception):
        create_markdown_artifact(
            failure_page(record, reason), key=f"{record.id}-report", description=f"Report of {record.id}"
        )


def show_links(record: RunRecord) -> None:
    """Link to the report folder and to the page in it. However the run ended, some of the report is there."""
    folder = report_folder(record).absolute()
    with suppress(Exception):
        create_link_artifact(folder.as_uri(), key=f"{record.id}-folder", link_text="report folder")
        if (folder / PAGE).exists():
            create_link_artifact((folder / PAGE).as_uri(), key=f"{record.id}-page", link_text="report page")


def result_page(result: RunResult) -> str:
    """Return the result as a page in Markdown."""
    summary = result.summary
    lines = [f"# {result.run}", "", "| | problems | before | after | gain |", "|---|---|---|---|---|"]
    for row in summary["result"]:
        numbers = [number(row[name], 3) for name in ("before", "after", "gain")]
        lines.append(f"| {row['what']} | {row['problems']} | {' | '.join(numbers)} |")
    counts = f"{summary['iterations']} iterations, {summary['samples']} samples"
    lines += ["", f"{counts}, {summary['dead_letters']} dead letters. Report: `{result.report}`"]
    if (result.report / PAGE).exists():
        lines += ["", f"The page with curves and samples: `{result.report / PAGE}`"]
    return "\n".join(lines)


def failure_page(record: RunRecord, reason: str) -> str:
    """Return a page in Markdown about a run that ended before it was done. The reason is shown as it is."""
    shown = reason[:_LONGEST_REASON].replace("```", "'''")
    told = f"# {record.id}\n\nThe run ended before it was done:\n\n```\n{shown}\n```"
    return f"{told}\n\nReport and logs: `{report_folder(record)}`"
