"""The bus: topics to which records are appended and from which they are read by position.

It is Kafka (`infra.kafka_bus`), or a fake for tests (`infra.memory_bus`). Readers keep their positions
themselves, since progress belongs to the trainer's checkpoint. So each reader is assigned partitions, and
none joins a consumer group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.errors import Explained
from infra.waiting import Wait
from schemas.topics import Topic

LARGEST_RECORD = 8 << 20  # maximum bytes of a record, on any bus
SMALL_BATCH = 64 << 10  # bytes of a batch whose records are fetched one by one


class BusError(Explained):
    """The bus can't do what is asked; the message names broker and topic."""


class NoBroker(BusError):
    """No broker answers, or none that can be used."""


@dataclass(frozen=True, slots=True)
class Record:
    """A record with its position in its topic."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes

    @property
    def name(self) -> str:
        """The key as text, with bytes that are not UTF-8 replaced."""
        return self.key.decode(errors="replace")

    @property
    def place(self) -> str:
        """Topic, partition and offset as text, for people and for `streamrl skip`: `count-1.ledger[0]@17`."""
        return f"{self.topic}[{self.partition}]@{self.offset}"


class Sent(Protocol):
    """A record that was sent and may not be acknowledged yet."""

    def offset(self) -> int:
        """Return the record's position in its partition. Raise BusError if `flush` has not returned yet."""


class Writer(Protocol):
    """Appends records to topics. A record is durable once `flush` has returned."""

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> Sent:
        """Append a record and return at once. If that fails, a later call of `send` or `flush` raises."""

    def flush(self, deadline_s: float) -> None:
        """Wait until all in-sync replicas have acknowledged all records; raise BusError if they don't."""

    def close(self) -> None:
        """Flush for a short while and release the connection."""


class Reader(Protocol):
    """Reads partitions of one topic from given positions."""

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        """Return at most `most` of the next records, or none if none comes within `wait_s`."""

    def begin_offsets(self) -> dict[int, int]:
        """Return, by partition, the position of the oldest record that is kept."""

    def end_offsets(self) -> dict[int, int]:
        """Return, by partition, the position behind the newest record."""

    def positions(self) -> dict[int, int]:
        """Return, by partition, the position of the record that is read next."""

    def seek(self, positions: Mapping[int, int]) -> None:
        """Continue at these positions, given by partition."""

    def close(self) -> None:
        """Release the connection."""


class Fetcher(Protocol):
    """Reads single records of any topic by position. An idle fetcher costs nothing."""

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        """Return the records at the `wanted` offsets of each partition, keyed by partition and offset.

        Offsets without a record are left out. Records that came along in the same batches are included.
        """

    def close(self) -> None:
        """Release the connection."""


class Bus(Protocol):
    """Creates topics, writers and readers."""

    def create_topics(self, topics: Sequence[Topic]) -> None:
        """Create the topics that are missing. Raise BusError if one exists with too few partitions."""

    def topic_names(self) -> set[str]:
        """Return the names of all topics on the bus."""

    def delete_topics(self, names: Collection[str]) -> None:
        """Delete topics with all their records. Names of topics that don't exist are ignored."""

    def writer(self, batch: int | None = None) -> Writer:
        """Return a writer for any topic.

        `batch`: maximum bytes that are sent as one batch; None means the default. Fetching one record brings
        the whole batch that it is in.
        """

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> Reader:  # fmt: skip
        """Return a reader of a topic's partitions, or of the partition `only`.

        `start`: position of the first record, by partition (default: the oldest record that is kept).
        `patient`: after its first poll the reader is asked for nothing but records. It then costs next to
        nothing while there are none, but would answer only after seconds if it were asked for its ends.
        """

    def fetcher(self) -> Fetcher:
        """Return a reader of single records."""

    def close(self) -> None:
        """Release all connections."""


def read_all(
    bus: Bus, topic: Topic, start: Mapping[int, int] | None = None, *, deadline_s: float
) -> list[Record]:
    """Return all records from `start` to the end that the topic has now; in order within each partition."""
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
    """Yield records until the reader is at `ends`; the last batch may go beyond them."""
    wait = Wait(f"records of {topic.name}", unblocked_by="the Kafka broker", deadline_s=deadline_s)
    while any(reader.positions()[partition] < end for partition, end in ends.items()):
        batch = reader.poll(0.2)
        yield from batch
        wait.progress() if batch else wait.check()


def clamp(reader: Reader) -> dict[int, int]:
    """Move a reader on to the oldest kept record wherever retention has deleted its position.

    Return, by partition, how many records that passes over; partitions where none are gone are left out.
    """
    begins, positions = reader.begin_offsets(), reader.positions()
    gone = {
        number: begin - positions[number] for number, begin in begins.items() if positions[number] < begin
    }
    if gone:
        reader.seek({number: begins[number] for number in gone})
    return gone


def begins_of(bus: Bus, topic: Topic) -> dict[int, int]:
    """Return, by partition, the position of a topic's oldest kept record."""
    reader = bus.reader(topic)
    try:
        return reader.begin_offsets()
    finally:
        reader.close()


def ends_of(bus: Bus, topic: Topic, *, only: int | None = None) -> dict[int, int]:
    """Return, by partition, where a topic ends now. A reader that starts there sees only later records."""
    reader = bus.reader(topic, only=only)
    try:
        return reader.end_offsets()
    finally:
        reader.close()


def near_ends(bus: Bus, topic: Topic, newest: int) -> dict[int, int]:
    """Return, by partition, the position where the `newest` last records begin."""
    reader = bus.reader(topic)
    try:
        begins = reader.begin_offsets()
        return {part: max(begins[part], end - newest) for part, end in reader.end_offsets().items()}
    finally:
        reader.close()
