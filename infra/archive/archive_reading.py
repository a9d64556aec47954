"""Reads an archive: finds segments by number or by offset, and records by their places in the log."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.archive.archived_topics import KINDS
from infra.archive.merged_segments import (
    MergedPlace,
    MergedSegment,
    covering,
    merged_key,
    merged_places,
)
from infra.archive.segments import (
    LARGEST_SEGMENT,
    ArchiveError,
    ArchiveFile,
    Segment,
    file_key,
    read_segment,
    segment_key,
)
from infra.bus import Record
from infra.keys import ring_from_env
from infra.stores.store import Missing, Store
from schemas.wire import Message

if TYPE_CHECKING:
    import pyarrow as pa

_HELD_SEGMENTS = 64
_HELD_MERGED = 8
_HELD_BYTES = 256 << 20  # of tables that are kept because the next records may be in them
_AT_ONCE = 16  # segments that are read at the same time


class ArchiveIndex:
    """The segments of one run's archive. Several threads may use it."""

    def __init__(self, store: Store, run: str, identity: str, *, still: bool = False) -> None:
        """`still`: what passes add after the first look is left out."""
        self.store, self.run, self._identity, self._still = store, run, identity, still
        self.ring = ring_from_env()
        self._held: OrderedDict[int, Segment] = OrderedDict()
        self._count = 0  # segments that are known to be there
        self._looked = False
        self._merged: list[Segment] = []  # merged ones that took the place of others
        self._lock = threading.RLock()

    @property
    def signed(self) -> bool:
        """Whether a trusted key has to have signed the archive."""
        return self.ring.trusts

    def count(self) -> int:
        """Return how many segments there are now."""
        with self._lock:
            if not (self._still and self._looked) and self._is_there(self._count):
                step = 1
                while self._is_there(self._count + step):
                    step *= 2
                low, high = self._count + step // 2, self._count + step  # the first is there, the second not
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (middle, high) if self._is_there(middle) else (low, middle)
                self._count = high
            self._looked = True
            return self._count

    def _is_there(self, number: int) -> bool:
        return self.store.exists(segment_key(self.run, number))

    def newest(self, *, look: bool = True) -> Segment | None:
        """Return the newest segment; None if there is none. Without `look`, the newest that is known."""
        with self._lock:
            count = self.count() if look or not self._count else self._count
            return self.segment(count - 1) if count else None

    def segment(self, number: int) -> Segment:
        """Return a segment. Raises ArchiveError if it can't be believed, Missing if it is not there."""
        with self._lock:
            if (held := self._held.get(number)) is None:
                held = self._held[number] = self._read(number)
                while len(self._held) > _HELD_SEGMENTS:
                    self._held.popitem(last=False)
            self._held.move_to_end(number)
            return held

    def _read(self, number: int) -> Segment:
        key = segment_key(self.run, number)
        raw = self.store.get(key, LARGEST_SEGMENT)
        where = f"{self.store.url}/{key}"
        return read_segment(raw, self.run, self._identity, number, where, self.ring, Segment)

    def at(self, place: MergedPlace) -> Segment:
        """Return a merged segment by its place, or the one segment that is there."""
        if place[0] == place[1]:
            return self._read(place[0])
        key = merged_key(self.run, place)
        raw, where = self.store.get(key, LARGEST_SEGMENT), f"{self.store.url}/{key}"
        found = read_segment(raw, self.run, self._identity, place[1], where, self.ring, MergedSegment)
        if found.first != place[0]:
            raise ArchiveError(f"{where} begins with segment {found.first}")
        return found

    def up_to(self, newest: Segment | None) -> Iterator[Segment]:
        """Yield segments that have all up to one, in order: merged ones where there are some."""
        count = newest.number + 1 if newest is not None else 0
        places = covering(merged_places(self.store, self.run), count) if count else []
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="segments") as pool:
            yield from pool.map(self.at, places)

    def holding(self, segment: Segment) -> Segment:
        """Return the segment whose files have a segment's records, as far as that is known."""
        with self._lock:
            held = (one for one in self._merged if one.first_number <= segment.number <= one.number)
            return next(held, segment)

    def wider(self, segment: Segment) -> Segment | None:
        """Return the merged segment that has taken a segment's place; None if there is none."""
        with self._lock:
            first, last = segment.first_number, segment.number
            places = [
                place
                for place in merged_places(self.store, self.run)
                if place[0] <= first and last <= place[1] and place != (first, last)
            ]
            if not places:
                return None
            found = self.at(min(places, key=lambda place: place[1] - place[0]))
            self._merged = [found, *(one for one in self._merged if one is not segment)][:_HELD_MERGED]
            return found

    def with_offset(self, topic: str, partition: int, offset: int) -> Segment | None:
        """Return the first segment that goes beyond an offset; None if none does."""
        with self._lock:
            newest = self.newest(look=False)
            if newest is None or _end(newest, topic, partition) <= offset:
                newest = self.newest()  # a pass may have added some since
            if newest is None or _end(newest, topic, partition) <= offset:
                return None
            low, high = -1, newest.number  # the second goes beyond it, the first does not
            while high - low > 1:
                middle = (low + high) // 2
                beyond = _end(self.segment(middle), topic, partition) > offset
                low, high = (low, middle) if beyond else (middle, high)
            return self.segment(high)


def _end(segment: Segment, topic: str, partition: int) -> int:
    span = segment.span(topic, partition)
    return span.end if span is not None else 0


@dataclass(frozen=True)
class _HeldFile:
    table: pa.Table
    starts: dict[int, int]  # by partition, its first row
    offsets: Sequence[int]


class ArchiveStock:
    """The archived records of one topic, as far as none is missing behind them."""

    def __init__(self, index: ArchiveIndex, topic: str, short: str) -> None:
        """`short`: the topic's short name, such as `samples`."""
        self._index, self._topic, self._short = index, topic, short
        self._kind: type[Message] = KINDS[short]
        self._tables: OrderedDict[str, _HeldFile] = OrderedDict()
        self._lock = threading.RLock()

    def begin(self, partition: int) -> int:
        newest = self._index.newest()
        span = newest.span(self._short, partition) if newest is not None else None
        return span.since if span is not None else 0

    def end(self, partition: int) -> int:
        newest = self._index.newest()
        return _end(newest, self._short, partition) if newest is not None else 0

    def reach(self, partition: int, position: int) -> tuple[int, int]:
        """Return where the records of a partition begin and end. A pass may add some while this is in use.

        `position`: the archive is looked at again only if it did not reach so far when it was last looked at.
        """
        for look in (False, True):
            newest = self._index.newest(look=look)
            span = newest.span(self._short, partition) if newest is not None else None
            if span is not None and span.end >= position:
                break
        return (span.since, span.end) if span is not None else (0, 0)

    def read(self, partition: int, offset: int, most: int) -> Sequence[Record]:
        with self._lock:
            while most > 0:
                segment = self._index.with_offset(self._short, partition, offset)
                if segment is None:
                    break
                if found := self._held_by(segment, partition, offset, most):
                    end = _end(self._index.newest(look=False) or segment, self._short, partition)
                    return [one for one in found if one.offset < end]  # a merged one may go further
                offset = _end(segment, self._short, partition)
        return []

    def _held_by(self, segment: Segment, partition: int, offset: int, most: int) -> list[Record]:
        """Return records of a segment, wherever its files have been merged into."""
        holding = self._index.holding(segment)
        while True:
            try:
                return self._read(holding, partition, offset, most)
            except Missing:
                if (wider := self._index.wider(holding)) is None:
                    raise
                holding = wider

    def _read(self, segment: Segment, partition: int, offset: int, most: int) -> list[Record]:
        """Return records of one segment. Of its files, only those are read that they are in."""
        parts = [
            (part.first, file)
            for file in segment.files
            if file.topic == self._short
            and (part := file.part(partition)) is not None
            and part.last >= offset
        ]
        found: list[Record] = []
        for first, file in sorted(parts, key=lambda one: one[0]):
            if len(found) >= most and found[most - 1].offset < first:
                break
            found += self._rows(file, partition, offset, most)
            found.sort(key=lambda record: record.offset)
            del found[most:]
        return found

    def _rows(self, file: ArchiveFile, partition: int, offset: int, most: int) -> Iterator[Record]:
        from infra.archive.columns import to_records

        held, part = self._table(file), file.part(partition)
        assert part is not None
        start = held.starts[partition]
        rows = [row for row in range(start, start + part.rows) if held.offsets[row] >= offset][:most]
        if not rows:
            return
        try:
            yield from to_records(held.table.slice(rows[0], len(rows)), self._topic, self._kind)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ArchiveError(f"{self._where(file)} has a row that is no record: {error}") from error

    def _table(self, file: ArchiveFile) -> _HeldFile:
        if (held := self._tables.get(file.name)) is None:
            raw = self._index.store.get(file_key(self._index.run, file), file.size)
            held = _parsed(raw, file, self._kind, self._where(file))
            self._tables[file.name] = held
            while (
                sum(one.table.nbytes for one in self._tables.values()) > _HELD_BYTES and len(self._tables) > 1
            ):
                self._tables.popitem(last=False)
        self._tables.move_to_end(file.name)
        return held

    def _where(self, file: ArchiveFile) -> str:
        return f"{self._index.store.url}/{file_key(self._index.run, file)}"


def _parsed(raw: bytes, file: ArchiveFile, kind: type[Message], where: str) -> _HeldFile:
    from infra.archive.columns import OFFSET, PARTITION
    from infra.archive.parquet_files import check_digest, read_table

    check_digest(raw, file, where)
    table = read_table(raw, file, kind, where)
    partitions, offsets = table[PARTITION].to_pylist(), table[OFFSET].to_pylist()
    starts: dict[int, int] = {}
    row = 0
    for part in sorted(file.parts, key=lambda one: one.partition):
        mine = slice(row, row + part.rows)
        own = offsets[mine]
        ordered = all(before < after for before, after in itertools.pairwise(own))
        ends = bool(own) and (own[0], own[-1]) == (part.first, part.last)
        if set(partitions[mine]) != {part.partition} or not ordered or not ends:
            raise ArchiveError(f"{where} has other records than its segment says")
        starts[part.partition] = row
        row += part.rows
    return _HeldFile(table, starts, offsets)
