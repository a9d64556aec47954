"""A bus in memory, for unit tests: it behaves as Kafka's does, within one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from infra.bus import LARGEST_RECORD, BusError, Record
from schemas.topics import Topic


class MemoryBus:
    """A bus whose topics are lists of records. Several threads may use it."""

    def __init__(self) -> None:
        self._topics: dict[str, list[list[Record]]] = {}
        self._begins: dict[tuple[str, int], int] = {}  # of partitions that `truncate` has cut
        self._changed = threading.Condition()

    def create_topics(self, topics: Sequence[Topic]) -> None:
        for topic in topics:
            self._topics.setdefault(topic.name, [[] for _ in range(topic.partitions)])

    def topic_names(self) -> set[str]:
        return set(self._topics)

    def delete_topics(self, names: Collection[str]) -> None:
        for name in names:
            self._topics.pop(name, None)

    def writer(self, batch: int | None = None) -> MemoryWriter:
        return MemoryWriter(self)

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> MemoryReader:  # fmt: skip
        numbers = range(topic.partitions) if only is None else [only]
        begins = {number: self.begin(topic, number) for number in numbers}
        return MemoryReader(
            self, topic, {number: (start or {}).get(number, begins[number]) for number in numbers}
        )

    def fetcher(self) -> MemoryFetcher:
        return MemoryFetcher(self)

    def close(self) -> None:
        pass

    def append(self, topic: Topic, partition: int, key: bytes, value: bytes) -> MemorySent:
        """Append a record, on behalf of a writer."""
        if len(key) + len(value) > LARGEST_RECORD:
            raise BusError(
                f"{topic.name} can't be written: a record of {len(value)} bytes is larger than "
                f"{LARGEST_RECORD}, the most that the bus takes"
            )
        with self._changed:
            log = self.log(topic)[partition]
            sent = MemorySent(self.end(topic, partition))
            log.append(Record(topic.name, partition, sent.at, key, value))
            self._changed.notify_all()
            return sent

    def log(self, topic: Topic) -> list[list[Record]]:
        """Return a topic's records by partition, as far as they are kept."""
        if topic.name not in self._topics:
            raise BusError(f"topic {topic.name} does not exist: create_topics makes it")
        return self._topics[topic.name]

    def truncate(self, topic: Topic, partition: int, before: int) -> None:
        """Delete the records before a position, as retention does."""
        with self._changed:
            begin = self.begin(topic, partition)
            del self.log(topic)[partition][: max(0, before - begin)]
            self._begins[topic.name, partition] = max(before, begin)

    def begin(self, topic: Topic, partition: int) -> int:
        """Return the position of the oldest record that is kept."""
        return self._begins.get((topic.name, partition), 0)

    def end(self, topic: Topic, partition: int) -> int:
        """Return the position behind the newest record."""
        return self.begin(topic, partition) + len(self.log(topic)[partition])

    def slice(self, topic: Topic, partition: int, position: int, most: int) -> list[Record]:
        """Return at most `most` records from a position on. Raise BusError if it is gone, as with Kafka."""
        with self._changed:
            begin = self.begin(topic, partition)
            if position < begin:
                raise BusError(
                    f"{topic.name}[{partition}]@{position} is gone: the partition begins at {begin}"
                )
            return self.log(topic)[partition][position - begin : position - begin + most]

    def wait(self, seconds: float) -> None:
        """Wait until something is appended, for at most so many seconds."""
        with self._changed:
            self._changed.wait(seconds)


@dataclass(frozen=True)
class MemorySent:
    """A record that has already been appended."""

    at: int

    def offset(self) -> int:
        return self.at


class MemoryWriter:
    """Appends records to the lists at once."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> MemorySent:
        return self._bus.append(topic, partition, key.encode(), value)

    def flush(self, deadline_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryReader:
    """Reads records from the lists."""

    def __init__(self, bus: MemoryBus, topic: Topic, start: dict[int, int]) -> None:
        self._bus, self._topic, self._positions = bus, topic, start

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        deadline = time.monotonic() + wait_s
        while True:
            found: list[Record] = []
            for partition, position in self._positions.items():
                batch = self._bus.slice(self._topic, partition, position, most - len(found))
                self._positions[partition] += len(batch)
                found += batch
            left = deadline - time.monotonic()
            if found or left <= 0:
                return found
            self._bus.wait(left)

    def begin_offsets(self) -> dict[int, int]:
        return {partition: self._bus.begin(self._topic, partition) for partition in self._positions}

    def end_offsets(self) -> dict[int, int]:
        return {partition: self._bus.end(self._topic, partition) for partition in self._positions}

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    def seek(self, positions: Mapping[int, int]) -> None:
        self._positions.update(positions)

    def close(self) -> None:
        pass


class MemoryFetcher:
    """Looks up single records in the lists."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        found: dict[tuple[int, int], Record] = {}
        for partition, offsets in wanted.items():
            if 0 <= partition < len(self._bus.log(topic)):
                begin = self._bus.begin(topic, partition)
                for offset in offsets:
                    if offset >= begin and (record := self._bus.slice(topic, partition, offset, 1)):
                        found[partition, offset] = record[0]
        return found

    def close(self) -> None:
        pass
