"""The bus: topics that records are appended to and read from by position. Kafka behind it, or a fake.

Positions are ours (see design: progress belongs to the trainer's checkpoint), so readers are assigned
partitions and never join a group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.errors import Explained
from infra.waiting import Wait
from schemas.topics import Topic

LARGEST_RECORD = 8 << 20  # bytes: no record is larger, whatever the bus
SMALL_BATCH = 64 << 10  # bytes of records that others fetch one by one


class BusError(Explained):
    """The bus can't do what is asked; the message names broker and topic."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record and where it stands."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes

    @property
    def name(self) -> str:
        """Its key as text; bytes that are no UTF-8 are replaced."""
        return self.key.decode(errors="replace")

    @property
    def place(self) -> str:
        """Where it stands, for people and for `streamrl skip`."""
        return f"{self.topic}[{self.partition}]@{self.offset}"


class Sent(Protocol):
    """A record on its way."""

    def offset(self) -> int:
        """Its position in its partition. Known once `flush` has returned, or raises BusError."""


class Writer(Protocol):
    """Appends records; a record is durable once `flush` has returned."""

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> Sent:
        """Append a record. Returns at once; a failure is raised by the next call of any method."""

    def flush(self, deadline_s: float) -> None:
        """Return when every record sent so far is acknowledged by all in-sync replicas."""

    def close(self) -> None:
        """Flush shortly and let go."""


class Reader(Protocol):
    """Reads partitions of one topic from given positions."""

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        """The next records, or none after `wait_s`."""

    def begin_offsets(self) -> dict[int, int]:
        """The position of the oldest record of each partition that is kept."""

    def end_offsets(self) -> dict[int, int]:
        """The position behind the newest record of each partition."""

    def positions(self) -> dict[int, int]:
        """The position of the next record of each partition."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Go on from here, in these partitions."""

    def close(self) -> None:
        """Let go."""


class Fetcher(Protocol):
    """Reads single records by position, of any topic; it costs nothing while nothing is asked of it."""

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        """Records by partition and position, of those `wanted` by partition the ones that are there.

        Others that came along with them are among the result too.
        """

    def close(self) -> None:
        """Let go."""


class Bus(Protocol):
    """Makes topics, writers and readers."""

    def create_topics(self, topics: Sequence[Topic]) -> None:
        """Create those that are missing; refuse those that exist with too few partitions."""

    def topic_names(self) -> set[str]:
        """All topics that are there."""

    def delete_topics(self, names: Collection[str]) -> None:
        """Remove topics with all their records; those that are not there are passed over."""

    def writer(self, batch: int | None = None) -> Writer:
        """A writer for any topic. `batch`: bytes that it sends as one; who fetches one record fetches all."""

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> Reader:  # fmt: skip
        """A reader of a topic's partitions, or of `only` one, from `start` (default: from the beginning).

        `patient`: once it has been polled it is asked for nothing but records. While there are none it costs
        next to nothing; asked for its ends it would answer only after seconds.
        """

    def fetcher(self) -> Fetcher:
        """A reader of single records."""

    def close(self) -> None:
        """Let go of all connections."""


def read_all(
    bus: Bus, topic: Topic, start: Mapping[int, int] | None = None, *, deadline_s: float
) -> list[Record]:
    """Every record from `start` up to the end as it is now, partition by partition in order."""
    reader = bus.reader(topic, start)
    try:
        ends = reader.end_offsets()
        found = read_until(reader, ends, topic, deadline_s=deadline_s)
        return [record for record in found if record.offset < ends[record.partition]]
    finally:
        reader.close()


def read_until(
    reader: Reader, ends: Mapping[int, int], topic: Topic, *, deadline_s: float
) -> Iterator[Record]:
    """What a reader reads until it is at `ends`, one by one; the last batch may go beyond."""
    wait = Wait(f"records of {topic.name}", unblocked_by="the Kafka broker", deadline_s=deadline_s)
    while any(reader.positions()[partition] < end for partition, end in ends.items()):
        batch = reader.poll(0.2)
        yield from batch
        wait.progress() if batch else wait.check()


def clamp(reader: Reader) -> dict[int, int]:
    """Where a reader's position is gone by retention, go on at the oldest record that is kept.

    By partition, how many records that passes over: nothing if none are gone.
    """
    begins, positions = reader.begin_offsets(), reader.positions()
    gone = {
        number: begin - positions[number] for number, begin in begins.items() if positions[number] < begin
    }
    if gone:
        reader.seek({number: begins[number] for number in gone})
    return gone


def begins_of(bus: Bus, topic: Topic) -> dict[int, int]:
    """Where the oldest records of a topic stand that are kept."""
    reader = bus.reader(topic)
    try:
        return reader.begin_offsets()
    finally:
        reader.close()


def ends_of(bus: Bus, topic: Topic, *, only: int | None = None) -> dict[int, int]:
    """Where a topic ends now: who reads on from there sees only what comes."""
    reader = bus.reader(topic, only=only)
    try:
        return reader.end_offsets()
    finally:
        reader.close()


def near_ends(bus: Bus, topic: Topic, newest: int) -> dict[int, int]:
    """Where the newest so many records of each partition begin."""
    reader = bus.reader(topic)
    try:
        begins = reader.begin_offsets()
        return {part: max(begins[part], end - newest) for part, end in reader.end_offsets().items()}
    finally:
        reader.close()
