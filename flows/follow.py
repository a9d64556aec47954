"""Keeps a RunView up to date from a thread of its own: a broker that is away must not stop supervision."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TypeVar

from flows.view import RunView
from infra.bus import Bus, BusError, Reader, Record
from infra.process import connect
from infra.runs import RunRecord
from schemas.messages import (
    DeadLetter,
    Evaluation,
    Heartbeat,
    Prompt,
    SiteReport,
    StepRecord,
    WeightsAnnouncement,
)
from schemas.topics import Topic, Topics
from schemas.wire import Message, Unreadable, decode

EVERY_S = 1.0
AGAIN_S = 2.0

T = TypeVar("T")
Kinds = tuple[type[Message], ...]


class _Readers:
    """One reader for each topic of the view, and one that only counts samples."""

    def __init__(self, bus: Bus, topics: Topics) -> None:
        kinds: list[tuple[Topic, Kinds]] = [
            (topics.prompts, (Prompt,)), (topics.ledger, (StepRecord,)), (topics.evals, (Evaluation,)),
            (topics.weights, (WeightsAnnouncement, SiteReport)), (topics.dead, (DeadLetter,)),
            (topics.status, (Heartbeat,)),
        ]  # fmt: skip
        self._readers: list[tuple[Reader, Kinds]] = []
        try:
            for topic, found in kinds:
                self._readers.append((bus.reader(topic), found))
            self._samples = bus.reader(topics.samples)
        except BusError:
            self.close()
            raise

    def read(self, wait_s: float) -> tuple[list[Message], dict[int, int]]:
        """What is there now, and where the partitions of the samples end."""
        found: list[Message] = []
        for reader, kinds in self._readers:
            while records := reader.poll(wait_s):
                found += _readable(records, kinds)
        return found, self._samples.end_offsets()

    def behind(self) -> bool:
        """Whether something is left to read."""
        return any(
            reader.positions()[partition] < end
            for reader, _ in self._readers
            for partition, end in reader.end_offsets().items()
        )

    def close(self) -> None:
        """Let go."""
        for reader, _ in self._readers:
            reader.close()
        if hasattr(self, "_samples"):
            self._samples.close()


def _readable(records: list[Record], kinds: Kinds) -> Iterator[Message]:
    for record in records:
        for kind in kinds:
            # Who works with a record reports it if it can't be read. Here it would only be missing in a view.
            with contextlib.suppress(Unreadable):
                yield decode(record.value, kind)
                break


def look(record: RunRecord, *, deadline_s: float = 20.0) -> RunView:
    """A run as it is now: every topic read once to its end."""
    view = RunView(record.id, record.spec)
    readers = _Readers(connect(record, "streamrl-look"), Topics(record.id, record.spec.lengths.classes))
    try:
        until = time.monotonic() + deadline_s
        while readers.behind() and time.monotonic() < until:
            view.take_all(*readers.read(0.1))
    finally:
        readers.close()
    return view


class Follower:
    """A view that follows a run while the block lasts."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._topics = Topics(record.id, record.spec.lengths.classes)
        self._view = RunView(record.id, record.spec)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if kind is None:
            self._thread.join(5)  # else it ends with the process: who cancels must not wait for a broker

    def see(self, look: Callable[[RunView], T]) -> T:
        """What `look` makes of the view, while nothing changes it."""
        with self._lock:
            return look(self._view)

    def _follow(self) -> None:
        while not self._end.is_set():
            try:
                self._follow_until_trouble()
            except BusError as error:
                with self._lock:
                    self._view.trouble = str(error)
            self._end.wait(AGAIN_S)

    def _follow_until_trouble(self) -> None:
        readers = _Readers(connect(self._record, "streamrl-view"), self._topics)
        # From the beginning, and then over the old one: a run's ledger is small, and a view that missed
        # records while the broker was away would count wrongly from then on.
        fresh = RunView(self._record.id, self._record.spec)
        try:
            while not self._end.is_set():
                found = readers.read(0.01)  # outside the lock: a broker that is away keeps us here
                with self._lock:
                    fresh.take_all(*found)
                if fresh is self._view:
                    self._end.wait(EVERY_S)
                elif not readers.behind():
                    with self._lock:
                        self._view = fresh
        finally:
            readers.close()
