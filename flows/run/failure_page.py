"""Writes the page of a run that fails or is interrupted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.page.page_data import FAILED, INTERRUPTED, SaidState
from flows.page.page_file import write_page
from flows.run.locations import Places, report_folder
from flows.run.request import RunCancelled
from infra.errors import Explained
from infra.runs import RunRecord

_PAGE_S, _MOST_S = 5.0, 12.0  # for the topics, and for all: whoever pressed Ctrl-C waits for it
_LONGEST = 4000


@contextlib.contextmanager
def page_on_failure(record: RunRecord, places: Places, say: Callable[[str], None]) -> Iterator[None]:
    """If the block raises, write the run's page within seconds; the same error goes on.

    Nothing that goes wrong here hides that error, and another Ctrl-C ends the writing.
    """
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(Exception, KeyboardInterrupt):
            _write_soon(record, places, _said(error), say)
        raise


def _said(error: BaseException) -> SaidState:
    if isinstance(error, RunCancelled) or not isinstance(error, Exception):
        return SaidState(INTERRUPTED)
    why = str(error) if isinstance(error, Explained) else f"{type(error).__name__}: {error}"
    return SaidState(FAILED, why[:_LONGEST])


def _write_soon(record: RunRecord, places: Places, said: SaidState, say: Callable[[str], None]) -> None:
    """Write the page in a thread, and wait for it only for some seconds."""
    written: list[Path] = []

    def write() -> None:
        with contextlib.suppress(Exception):
            store, folder = places.open_store(), report_folder(record)
            written.append(write_page(record, store, folder, said=said, deadline_s=_PAGE_S))

    thread = threading.Thread(target=write, name="page", daemon=True)
    thread.start()
    thread.join(_MOST_S)
    say(f"the page of the run: {written[0] if written else f'streamrl report {record.id} writes it'}")
