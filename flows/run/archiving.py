"""Archives runs: one pass over a run by its id, and passes now and then while a run goes on.

A pass has to come before retention removes what is not archived. If passes fail, the run says so once half of
that time has gone by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.run.locations import named_store
from flows.run.request import RunCancelled
from infra.archive.archive_writing import ArchivePass, ArchiveProgress, ArchiveWriter
from infra.errors import Explained
from infra.run_bus import connect
from infra.runs import RunRecord, find
from infra.stores.store import Store
from infra.stores.store_identity import check_identity
from schemas.topics import Topics

_END_S = 600.0  # that the last pass of a run may take


def archive_now(
    run: str, store_name: str = "local", progress: ArchiveProgress = lambda done, total: None
) -> ArchivePass:
    """Archive all that the log of a run has now."""
    store = named_store(store_name)
    return _pass(store, find(store, run), progress, lambda: False)


def _pass(
    store: Store, record: RunRecord, progress: ArchiveProgress, stop: Callable[[], bool]
) -> ArchivePass:
    check_identity(store, record.store_id)
    bus = connect(record, "streamrl-archive")
    try:
        writer = ArchiveWriter(
            bus, store, Topics(record.id, record.spec.lengths.classes), record.id, record.identity,
            deadline_s=record.spec.deadlines.progress_s,
        )  # fmt: skip
        return writer.archive(now=time.time(), progress=progress, stop=stop)
    finally:
        bus.close()


def pass_in_words(run: str, done: ArchivePass) -> str:
    """Return the result of a pass, for people."""
    unmerged = f"; small files could not be merged: {done.unmerged}" if done.unmerged else ""
    if not done.records:
        return f"run {run}: nothing came since the last pass{unmerged}"
    words = (
        f"run {run}: {done.records:,} records ({done.log_bytes / 1e6:.1f} MB in the log) are archived in "
        f"{done.file_bytes / 1e6:.1f} MB"
    )
    if done.unreadable:
        words += f"; {done.unreadable:,} of them could not be read, and are kept as they are"
    return words + unmerged


def lost_in_words(run: str, done: ArchivePass) -> str:
    """Return which records retention had removed before they were archived; empty if there are none."""
    if not done.lost:
        return ""
    lost = ", ".join(f"{count:,} of {topic}" for topic, count in done.lost.items())
    return (
        f"run {run}: records are gone that no pass had archived: {lost}. Archive more often "
        "(placement.archive.every_minutes), or keep records longer (placement.kafka.retention_hours)"
    )


def late_in_words(record: RunRecord, since_s: float, why: str) -> str:
    """Return a warning if retention may soon be quicker than the next pass; empty if there is time.

    `since_s`: seconds since the last pass that went well.
    """
    retention_s = record.spec.placement.kafka.retention_hours * 3600
    if since_s < retention_s / 2:
        return ""
    return (
        f"run {record.id} was not archived for {since_s / 3600:.1f} h ({why}): from "
        f"{retention_s / 3600:.0f} h on, Kafka removes records that are in no archive "
        "(placement.kafka.retention_hours)"
    )


@contextmanager
def archiving(record: RunRecord, store: Store, say: Callable[[str], None]) -> Iterator[None]:
    """If its run file says so, archive a run now and then during the block, and once more at its end.

    Whoever interrupts or cancels a run does not wait for that: the next pass makes up for it.
    """
    section = record.spec.placement.archive
    if section is None:
        yield
        return
    passes = _Passes(record, store, say)
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(section.every_minutes * 60):
            passes.one(ended.is_set)

    thread = threading.Thread(target=follow, daemon=True, name="archive")
    thread.start()
    last = False
    try:
        yield
        last = True
    except Exception as error:
        last = not isinstance(error, RunCancelled)
        raise
    finally:
        ended.set()
        thread.join(_END_S)
        if last:
            passes.one(lambda: False)


class _Passes:
    """Passes over a run. Each may fail: the next one goes on where the last one that went well ended."""

    def __init__(self, record: RunRecord, store: Store, say: Callable[[str], None]) -> None:
        self._record, self._store, self._say = record, store, say
        self._well_at, self._warned = time.monotonic(), False

    def one(self, stop: Callable[[], bool]) -> None:
        """Make a pass, and say what people should know of it."""
        try:
            done = _pass(self._store, self._record, lambda done, total: None, stop)
        except Explained as error:
            why = str(error)
            if not self._warned:
                self._say(f"run {self._record.id} can't be archived now: {why}")
        except Exception as error:  # a pass ends no run
            why = f"{type(error).__name__}: {error}"
            if not self._warned:
                self._say(f"run {self._record.id} can't be archived now: {why}")
        else:
            self._well_at, self._warned, why = time.monotonic(), False, ""
            if lost := lost_in_words(self._record.id, done):
                self._say(lost)
            return
        if late := late_in_words(self._record, time.monotonic() - self._well_at, why):
            self._say(late)
        self._warned = True
