"""Writes the last metrics and the page of a run that fails or is interrupted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.page.page_data import FAILED, INTERRUPTED, SaidState
from flows.page.page_file import write_page
from flows.run.locations import Places, named_as, report_folder
from flows.run.request import RunCancelled
from flows.run.suggested_commands import SuggestedCommands
from flows.view.follow import Follower
from flows.view.line_files import METRICS_FILE, MetricsFile, complete
from infra.errors import Explained
from infra.run_bus import connect
from infra.runs import RunRecord
from schemas.topics import Topics

# For the ledger, for the topics, and for all: whoever pressed Ctrl-C waits for it.
_METRICS_S, _PAGE_S, _MOST_S = 4.0, 5.0, 12.0
_LONGEST = 4000


@contextlib.contextmanager
def page_on_failure(
    record: RunRecord, places: Places, say: Callable[[str], None], follower: Follower | None = None
) -> Iterator[None]:
    """If the block raises, write the run's last metrics and its page within seconds; the same error goes on.

    Nothing that goes wrong here hides that error, and another Ctrl-C ends the writing.
    `follower`: the one that writes the metrics, until the block ends.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception, KeyboardInterrupt):
            _write_soon(record, places, _said(error), say, follower)
        raise


def _said(error: BaseException) -> SaidState:
    if isinstance(error, RunCancelled) or not isinstance(error, Exception):
        return SaidState(INTERRUPTED)
    why = str(error) if isinstance(error, Explained) else f"{type(error).__name__}: {error}"
    return SaidState(FAILED, why[:_LONGEST])


def _write_soon(
    record: RunRecord, places: Places, said: SaidState, say: Callable[[str], None], follower: Follower | None
) -> None:
    """Write all in a thread, and wait for it only for some seconds."""
    written: list[Path] = []

    def write() -> None:
        folder = report_folder(record)
        if follower is not None and follower.has_ended(_METRICS_S):
            with contextlib.suppress(Exception):
                _complete_metrics(record, folder)
        with contextlib.suppress(Exception):
            written.append(write_page(record, places.open_store(), folder, said=said, deadline_s=_PAGE_S))

    thread = threading.Thread(target=write, name="page", daemon=True)
    thread.start()
    thread.join(_MOST_S)
    again = SuggestedCommands(record.id, named_as(places.store_url)).command("report")
    say(f"the page of the run: {written[0] if written else f'{again} writes it'}")


def _complete_metrics(record: RunRecord, folder: Path) -> None:
    """Add the steps that were trained since the follower last looked."""
    bus, topics = connect(record, "streamrl-page"), Topics(record.id, record.spec.lengths.classes)
    bus.check()
    complete(MetricsFile(folder / METRICS_FILE), bus, topics, record.id, deadline_s=_METRICS_S)
