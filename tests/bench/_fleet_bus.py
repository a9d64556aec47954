"""One set of Kafka clients for all generators of a process.

A kafka-python client takes 5 to 10 ms of CPU a second without doing anything, and a generator has three:
little beside an engine on a machine of its own, but more than one machine has for a hundred of them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Mapping, Sequence

from infra.bus import Bus, Fetcher, Reader, Record, Writer
from schemas.topics import Topic


class SharedBus:
    """Reads each topic once from its beginning, and hands its records to all who read it."""

    def __init__(self, bus: Bus) -> None:
        self._bus, self._writer = bus, bus.writer()
        self._fetcher = _OneAtATime(bus.fetcher())
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()

    def create_topics(self, topics: Sequence[Topic]) -> None:
        self._bus.create_topics(topics)

    def topic_names(self) -> set[str]:
        return self._bus.topic_names()

    def delete_topics(self, names: Collection[str]) -> None:
        self._bus.delete_topics(names)

    def writer(self, batch: int | None = None) -> Writer:
        return self._writer

    def fetcher(self) -> Fetcher:
        return self._fetcher

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> Reader:  # fmt: skip
        with self._lock:
            if topic.name not in self._sources:
                self._sources[topic.name] = _Source(self._bus.reader(topic, patient=patient))
            source = self._sources[topic.name]
        parts = range(topic.partitions) if only is None else [only]
        return _Branch(source, {part: (start or {}).get(part, 0) for part in parts})

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._writer.close()


class _OneAtATime:
    """A fetcher for all: each is asked for little."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher, self._lock = fetcher, threading.Lock()

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        with self._lock:
            return self._fetcher.fetch(topic, wanted, deadline_s=deadline_s)

    def close(self) -> None:
        """It is closed with the process."""


class _Source:
    """A thread that reads a topic and keeps it: a branch that comes later sees it from its own start."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._kept: list[Record] = []
        self._branches: list[_Branch] = []
        self._closed = threading.Event()
        self._ends = reader.end_offsets()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end_offsets(self) -> dict[int, int]:
        """As of when it was opened, and what came since."""
        with self._lock:
            return dict(self._ends)

    def open(self, branch: _Branch) -> None:
        with self._lock:
            for record in self._kept:
                branch.offer(record)
            self._branches.append(branch)

    def leave(self, branch: _Branch) -> None:
        with self._lock:
            if branch in self._branches:
                self._branches.remove(branch)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._reader.close()

    def _follow(self) -> None:
        while not self._closed.is_set():
            for record in self._reader.poll(0.5):
                with self._lock:
                    self._kept.append(record)
                    self._ends[record.partition] = max(self._ends[record.partition], record.offset + 1)
                    for branch in self._branches:
                        branch.offer(record)


class _Branch:
    """A reader of a source."""

    def __init__(self, source: _Source, start: dict[int, int]) -> None:
        self._source, self._positions = source, start
        self._came: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._opened = False

    def offer(self, record: Record) -> None:
        """Called by the source."""
        if record.offset >= self._positions.get(record.partition, record.offset + 1):
            self._came.put(record)

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        if not self._opened:
            self._opened = True
            self._source.open(self)
        found: list[Record] = []
        try:
            found.append(self._came.get(timeout=wait_s))
            while len(found) < most:
                found.append(self._came.get_nowait())
        except queue.Empty:
            pass
        for record in found:
            self._positions[record.partition] = record.offset + 1
        return found

    def begin_offsets(self) -> dict[int, int]:
        return dict.fromkeys(self._positions, 0)  # nothing is collected while the bench runs

    def end_offsets(self) -> dict[int, int]:
        ends = self._source.end_offsets()
        return {part: ends[part] for part in self._positions}

    def seek(self, positions: Mapping[int, int]) -> None:
        if self._opened:
            raise RuntimeError("a branch goes where it begins: what came before is not kept for it")
        self._positions |= positions

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    def close(self) -> None:
        self._source.leave(self)
