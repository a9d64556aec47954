"""Merged segments: whatever passes, merges, removals and readers do in turns, each record is there once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.run.archive_query import answered
from infra.archive import merging
from infra.archive.archive_reading import ArchiveIndex, ArchiveStock
from infra.archive.archive_writing import ArchiveWriter
from infra.archive.merged_segments import MergedSegment, covering, merged_key, merged_places
from infra.archive.merging import ArchiveMerger
from infra.archive.segments import (
    ArchivedSpan,
    ArchiveError,
    ArchiveFile,
    FilePart,
    Segment,
    segment_bytes,
    segment_key,
)
from infra.bus import Record, read_all
from infra.keys import ring_from_env
from infra.stock_bus import StockBus
from infra.stores.file_store import FileStore
from infra.stores.store import Store
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec

SPEC = make_spec()


class Archived:
    """A log in memory and its archive, which is merged two segments at a time."""

    def __init__(self, folder: str, *, kept_s: float = 0.0) -> None:
        self.context = make_context(SPEC, Path(folder))
        self.store, self.topic, self.now = self.context.store, self.context.topics.samples, 0.0
        self.groups, self._kept_s = 0, kept_s

    def add(self, count: int) -> None:
        for _ in range(count):
            sample = make_sample(SPEC, self.groups, 0)
            self.context.writer.send(
                self.topic, encode(sample), key=sample.id, partition=(self.groups // 3) % 2
            )
            self.groups += 1

    def archive(self) -> None:
        context = self.context
        ArchiveWriter(
            context.bus, self.store, context.topics, context.run, "", deadline_s=5, window=7
        ).archive(now=self.now)

    def merge(self, *, store: Store | None = None, now: float | None = None) -> int:
        self.now += 1
        index = ArchiveIndex(store or self.store, self.context.run, "")
        merger = ArchiveMerger(index, fan=2, kept_s=self._kept_s)
        return merger.merge(now=self.now if now is None else now)

    def log(self) -> list[Record]:
        return in_order(read_all(self.context.bus, self.topic, deadline_s=5))

    def stock(self, *, still: bool = False) -> ArchiveStock:
        index = ArchiveIndex(self.store, self.context.run, "", still=still)
        return ArchiveStock(index, self.topic.name, "samples")

    def files(self) -> list[str]:
        return [key for key in self.store.list("archive") if key.endswith(".parquet")]

    def groups_by_sql(self) -> list[tuple[object, ...]]:
        sql = 'select "group" from samples order by 1'
        with answered(None, self.store, self.context.record, sql) as answer:
            return [row for rows in answer.rows for row in rows]


def in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda one: (one.partition, one.offset))


def some_at_a_time(archived: Archived, most: int) -> Iterator[list[Record]]:
    """Read the archive to its end, as it is now."""
    stock = archived.stock(still=True)
    reader = StockBus({archived.topic.name: stock}, "it").reader(archived.topic)
    ends = reader.end_offsets()

    def batches() -> Iterator[list[Record]]:
        while any(reader.positions()[part] < end for part, end in ends.items()):
            yield reader.poll(0.0, most)

    return batches()


@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 12)),
            st.tuples(st.sampled_from(["archive", "archive", "merge", "open", "read", "read"]), st.just(0)),
        ),
        max_size=40,
    ),
    most=st.integers(1, 9), large=st.sampled_from([0, 1500, 1 << 20]), rows=st.sampled_from([3, 12, 1 << 16]),
)  # fmt: skip
@settings(deadline=None, max_examples=20)
def test_nothing_is_lost_and_nothing_is_twice(
    actions: list[tuple[str, int]], most: int, large: int, rows: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(merging, "_LARGE_BYTES", large)
        patched.setattr(merging, "_MOST_ROWS", rows)
        archived = Archived(folder)
        archived.add(2)
        archived.archive()
        readers: list[tuple[Iterator[list[Record]], list[Record], list[Record]]] = []
        until = archived.log()
        for action, count in actions:
            if action == "add":
                archived.add(count)
            elif action == "archive":
                archived.archive()
                until = archived.log()
            elif action == "merge":
                archived.merge()
            elif action == "open":
                readers.append((some_at_a_time(archived, most), [], until))
            for reader, found, _ in readers if action == "read" else ():
                found += next(reader, [])
        archived.archive()
        archived.merge()
        readers.append((some_at_a_time(archived, most), [], archived.log()))
        for reader, found, wanted in readers:
            for batch in reader:
                found += batch
            assert in_order(found) == wanted
        assert archived.groups_by_sql() == [(group,) for group in range(archived.groups)]
        alone = archived.stock()
        for record in archived.log():
            assert list(alone.read(record.partition, record.offset, 1)) == [record]


class Dying(FileStore):
    """A folder whose user dies before one of its writes."""

    def __init__(self, url: str, left: int) -> None:
        super().__init__(url)
        self._left = left

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise KeyboardInterrupt

    def put(self, key: str, data: bytes) -> None:
        self._count()
        super().put(key, data)

    def put_new(self, key: str, data: bytes) -> None:
        self._count()
        super().put_new(key, data)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)


def test_a_merge_may_die_at_any_write_and_leaves_nothing_behind() -> None:
    writes = 0
    while True:
        with TemporaryDirectory() as folder:
            archived = Archived(folder)
            for _ in range(5):
                archived.add(5)
                archived.archive()
            died = False
            try:
                archived.merge(store=Dying(archived.store.url, writes))
            except KeyboardInterrupt:
                died = True
            assert archived.groups_by_sql() == [(group,) for group in range(25)]
            archived.merge()
            archived.merge()
            assert [one for batch in some_at_a_time(archived, 4) for one in batch]
            assert archived.groups_by_sql() == [(group,) for group in range(25)]
            index = ArchiveIndex(archived.store, archived.context.run, "")
            named = {
                f"archive/test-1/{file.name}"
                for segment in index.up_to(index.newest()) for file in segment.files
            }  # fmt: skip
            assert set(archived.files()) == named
            assert not archived.store.list("archive/test-1/merged-away")
        if not died:
            return
        writes += 1


def test_files_stay_for_a_day_after_they_were_merged(tmp_path: Path) -> None:
    archived = Archived(str(tmp_path), kept_s=24 * 3600)
    for _ in range(4):
        archived.add(4)
        archived.archive()
    before = archived.files()
    assert archived.merge(now=1000.0) == 3
    assert set(before) < set(archived.files())
    assert archived.merge(now=1000.0 + 24 * 3600 - 1) == 0
    assert set(before) < set(archived.files())
    archived.merge(now=1000.0 + 24 * 3600)
    assert len(archived.files()) == 1


def test_segments_with_a_gap_between_them_are_not_merged(tmp_path: Path) -> None:
    archived = Archived(str(tmp_path))
    for forget in (False, True, False, False):
        archived.add(4)
        if forget:
            for part in range(2):
                end = archived.context.bus.end(archived.topic, part)  # type: ignore[attr-defined]
                archived.context.bus.truncate(archived.topic, part, end - 1)  # type: ignore[attr-defined]
        archived.archive()
    assert archived.merge() == 1
    assert merged_places(archived.store, "test-1") == [(2, 3)]


def test_segments_of_more_files_than_one_can_name_stay_as_they_are(tmp_path: Path) -> None:
    archived = Archived(str(tmp_path))
    store, run, each = archived.store, archived.context.run, 9000
    for number in range(2):
        begin = number * each
        span = ArchivedSpan(topic="samples", partition=0, since=0, begin=begin, end=begin + each)
        files = tuple(
            ArchiveFile(
                topic="samples", size=1, digest="0" * 64, record_bytes=32 << 20,
                name=f"samples/iteration={at:06d}/{number:08d}-{'0' * 16}.parquet",
                parts=(FilePart(partition=0, first=at, last=at, rows=1),),
            )
            for at in range(begin, begin + each)
        )  # fmt: skip
        segment = Segment(
            format=1, run=run, identity="", number=number, made_at=0.0, spans=(span,), files=files
        )
        store.put_new(segment_key(run, number), segment_bytes(segment, ring_from_env()))
    assert archived.merge() == 0
    assert not merged_places(store, run)


def test_a_merged_segment_is_believed_only_where_it_belongs(tmp_path: Path) -> None:
    archived = Archived(str(tmp_path))
    for _ in range(4):
        archived.add(4)
        archived.archive()
    archived.merge()
    raw = archived.store.get(merged_key("test-1", (0, 1)))
    index = ArchiveIndex(archived.store, "test-1", "")
    assert isinstance(index.at((0, 1)), MergedSegment)
    archived.store.put(merged_key("test-1", (1, 1 + 1)), raw)
    archived.store.put(merged_key("test-1", (0, 3)), raw)
    for place in ((1, 2), (0, 3)):
        with pytest.raises(ArchiveError):
            index.at(place)
    archived.store.put("archive/test-1/index/00000002.json", raw)
    with pytest.raises(ArchiveError):
        ArchiveIndex(archived.store, "test-1", "").segment(2)


@given(
    places=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)).map(lambda one: (one[0], sum(one)))),
    count=st.integers(0, 25),
)
def test_places_cover_all_segments_without_an_overlap(places: list[tuple[int, int]], count: int) -> None:
    found = covering(places, count)
    assert [number for first, last in found for number in range(first, last + 1)] == list(range(count))
    assert all(one in places for one in found if one[0] < one[1])
