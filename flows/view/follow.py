"""Keeps a RunView up to date in a thread of its own: a broker that is away must not stop supervision.

Topics are read from near their ends, so that a view of a run of any age costs the same. The view shows any
error, and reading is tried again; an error never ends a run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from flows.view.line_files import MetricsFile
from flows.view.run_view import RunView
from infra.bus import Bus, Reader, Record
from infra.gate import Gate, passed_over
from infra.run_bus import connect
from infra.runs import RunRecord
from schemas.messages import (
    BalanceRecord,
    DeadLetter,
    Evaluation,
    Heartbeat,
    RankerAnnouncement,
    SiteReport,
    StepRecord,
    WeightsAnnouncement,
)
from schemas.topics import Topic, Topics
from schemas.wire import Message

EVERY_S = 1.0
AGAIN_S = 2.0
_MANY = 300  # a read that gives so many messages is followed at once by another

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Part:
    """A topic of the view, its kinds of messages, and how many of its newest records are enough."""

    topic: Topic
    kinds: tuple[type[Message], ...]
    newest: int
    is_new: bool = False  # runs of older releases lack the topic


def _parts(topics: Topics) -> list[_Part]:
    return [
        _Part(topics.ledger, (StepRecord,), 300), _Part(topics.evals, (Evaluation,), 50),
        _Part(topics.weights, (WeightsAnnouncement, SiteReport), 200), _Part(topics.dead, (DeadLetter,), 5),
        _Part(topics.status, (Heartbeat,), 2000), _Part(topics.ranker, (RankerAnnouncement,), 2),
        _Part(topics.balance, (BalanceRecord,), 50, is_new=True),
    ]  # fmt: skip


class _Following:
    """A reader of one topic from near its end on."""

    def __init__(self, bus: Bus, run: str, part: _Part, start: int | None) -> None:
        """`start`: the offset to begin at, if that is before the newest records."""
        self.part = part
        self._gates: list[Gate[Any]] = [Gate(kind, run, passed_over) for kind in part.kinds]
        self._bus, self._start = bus, start

    def open(self) -> _Following:
        """Begin to read. Return itself."""
        part, start = self.part, self._start
        if part.is_new and part.topic.name not in self._bus.topic_names():
            return self
        self.reader = self._bus.reader(part.topic, {0: 0}, patient=True)
        begin, self.end = self.reader.begin_offsets()[0], self.reader.end_offsets()[0]
        near = max(begin, self.end - part.newest)
        self.reader.seek({0: near if start is None else max(begin, min(near, start))})
        return self

    @property
    def is_open(self) -> bool:
        """Whether there is anything to read."""
        return hasattr(self, "reader")

    def poll(self, wait_s: float) -> Iterator[tuple[Record, Message]]:
        """Yield the next records with their messages. Other processes report the unreadable ones."""
        for record in self.reader.poll(wait_s):
            for gate in self._gates:
                if (message := gate.take_one(record)) is not None:
                    yield record, message
                    break

    @property
    def is_behind(self) -> bool:
        """Whether records are left of those that were there at the beginning."""
        return self.reader.positions()[0] < self.end


class _Readers:
    """The readers of the view's topics, and one that only counts samples."""

    def __init__(self, bus: Bus, topics: Topics, run: str, *, ledger: int | None = None) -> None:
        """`ledger`: the offset from which the ledger is read, if that is before the newest records."""
        self.followed: list[_Following] = []
        self._samples: Reader | None = None
        self._dead, self._ledger = topics.dead, topics.ledger
        self._bus, self._topics = bus, topics
        self._parts = [
            _Following(bus, run, part, ledger if part.topic == topics.ledger else None)
            for part in _parts(topics)
        ]

    def open(self) -> _Readers:
        """Begin to read all topics. Return itself."""
        with ThreadPoolExecutor(len(self._parts) + 1, "view") as pool:  # each takes a moment
            samples = pool.submit(self._bus.reader, self._topics.samples)
            opened = [pool.submit(part.open) for part in self._parts]
        errors = [error for error in (samples.exception(), *(one.exception() for one in opened)) if error]
        self.followed = [one.result() for one in opened if one.exception() is None and one.result().is_open]
        self._samples = samples.result() if samples.exception() is None else None
        if errors:
            self.close()
            raise errors[0]
        return self

    def read(self, wait_s: float, take: Callable[[Record, StepRecord], None]) -> Iterator[Message]:
        """Yield at most a few hundred records of each topic. `take` is called for each step of the ledger.

        Each is unpacked when it is asked for: of a step, a record of some hundred kB may become 40 MB.
        """
        for one in self.followed:
            for record, message in one.poll(wait_s):
                if isinstance(message, StepRecord):
                    take(record, message)
                yield message

    def ends(self) -> dict[int, int]:
        """Return the end offset of each partition of `<run>.samples`."""
        assert self._samples is not None
        return self._samples.end_offsets()

    def dead(self) -> int:
        """Return how many dead letters there have been."""
        return next(one.reader.positions()[0] for one in self.followed if one.part.topic == self._dead)

    def ledger_from(self, position: int) -> None:
        """Read the ledger again from an offset on."""
        for one in self.followed:
            if one.part.topic == self._ledger:
                one.reader.seek({0: max(position, one.reader.begin_offsets()[0])})

    @property
    def is_behind(self) -> bool:
        """Whether any topic has records left of those that were there at the beginning."""
        return any(one.is_behind for one in self.followed)

    def close(self) -> None:
        """Close all readers."""
        for one in self.followed:
            one.reader.close()
        if self._samples is not None:
            self._samples.close()


def look_once(record: RunRecord, *, deadline_s: float = 20.0) -> RunView:
    """Return a view of a run as it is now, from the newest records of each topic."""
    view, topics = RunView(record.id, record.spec), Topics(record.id, record.spec.lengths.classes)
    readers = _Readers(connect(record, "streamrl-look"), topics, record.id).open()
    try:
        until = time.monotonic() + deadline_s
        while readers.is_behind and time.monotonic() < until:
            for one in readers.followed:
                if one.is_behind:
                    view.take_all((message for _, message in one.poll(0.5)), {})
        view.take_all([], readers.ends(), readers.dead())
    finally:
        readers.close()
    return view


class Follower:
    """A view that follows a run while the block lasts. `metrics`: a file that gets the run's steps."""

    def __init__(
        self, record: RunRecord, *, metrics: MetricsFile | None = None,
        also: Callable[[Message], None] = lambda message: None,
        connected: Callable[[RunRecord, str], Bus] = connect,
    ) -> None:  # fmt: skip
        """`also`: hears each message, too; those of the past may come again."""
        self._record, self._metrics, self._connected, self._also = record, metrics, connected, also
        self._topics = Topics(record.id, record.spec.lengths.classes)
        self._view = RunView(record.id, record.spec)
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._file_trouble, self._file_again_at = "", 0.0
        self._thread = self._started()

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if kind is None:
            self._thread.join(5)  # not after an error: a user who cancels must not wait

    def has_ended(self, deadline_s: float) -> bool:
        """Return whether it follows no more. Waits so long for the thread, once the block has ended."""
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _started(self) -> threading.Thread:
        return threading.Thread(target=self._follow, name="follower", daemon=True)

    def see(self, look_once: Callable[[RunView], _T]) -> _T:
        """Call `look_once` with the view while nothing changes it, and return its result."""
        if not self._thread.is_alive() and self._thread.ident is not None and not self._end.is_set():
            self._thread = self._started()  # the thread has died: follow on, whatever ended it
            self._thread.start()
        with self._lock:
            return look_once(self._view)

    def wait_for(self, seen: Callable[[RunView], bool], deadline_s: float) -> None:
        """Wait until `seen` is true of the view, for at most `deadline_s` seconds."""
        until = time.monotonic() + deadline_s
        while not self.see(seen) and time.monotonic() < until:
            time.sleep(EVERY_S / 10)

    def _follow(self) -> None:
        while not self._end.is_set():
            try:
                self._follow_until_trouble()
            except Exception as error:  # whatever it is: the view shows it, and reading is tried again
                with self._lock:
                    self._view.trouble = f"the view is not up to date: {error or type(error).__name__}"
                self._end.wait(AGAIN_S)

    def _follow_until_trouble(self) -> None:
        self._open_file()
        start = self._metrics.position or 0 if self._metrics is not None else None
        readers = _Readers(
            self._connected(self._record, "streamrl-view"), self._topics, self._record.id, ledger=start
        ).open()
        # A new view takes the old one's place once it is up to date: the old one missed records while the
        # broker was away, and would count wrongly from then on.
        fresh = RunView(self._record.id, self._record.spec)
        try:
            while not self._end.is_set():
                self._try_file_again(readers)
                count = 0
                # outside the lock: a broker that is away makes this wait
                for message in readers.read(0.01, self._keep):
                    count += 1
                    self._also(message)
                    with self._lock:
                        fresh.take(message)
                ends, dead = readers.ends(), readers.dead()
                behind = readers.is_behind
                with self._lock:
                    fresh.take_all((), ends, dead)
                    fresh.live = not behind
                    fresh.trouble = self._file_trouble
                    if fresh.live and fresh is not self._view:
                        fresh.left_out, self._view = self._view.left_out, fresh
                if not behind and count < _MANY:
                    self._end.wait(EVERY_S)
        finally:
            readers.close()

    def _open_file(self) -> None:
        if self._metrics is not None:
            try:
                self._metrics.open()
            except OSError as error:
                self._say_file(error)

    def _keep(self, record: Record, step: StepRecord) -> None:
        if self._metrics is None or self._file_trouble:
            return
        try:
            self._metrics.take(record, step)
        except OSError as error:
            self._say_file(error)

    def _say_file(self, error: OSError) -> None:
        assert self._metrics is not None
        self._file_trouble = f"{self._metrics.path} can't be written: {error}"
        self._file_again_at = time.monotonic() + 5 * AGAIN_S

    def _try_file_again(self, readers: _Readers) -> None:
        """Some seconds after an error of the file, go on from the step that could not be written."""
        if self._metrics is not None and self._file_trouble and time.monotonic() >= self._file_again_at:
            with contextlib.suppress(OSError):
                self._metrics.open()
            self._file_trouble = ""
            readers.ledger_from(self._metrics.position or 0)
