"""Merges the segments of an archive, so that a run with a pass a minute has no file for each minute.

16 segments in a row ──► one merged segment; 16 of these in a row ──► a larger one; and so on

A file that is large already stays as it is; small ones of a topic become larger ones, of at most a window. So
a record is written again only a few times. A merge may be killed anywhere: only its last write counts, and
another try makes the same files. If two are at work, they make the same.

Files that are merged into others stay for a day, as a query may be reading them. A reader of records that
finds one gone looks for the merged segment that took its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from blake3 import blake3

from infra.archive.archive_reading import ArchiveIndex
from infra.archive.archived_topics import KINDS
from infra.archive.file_notes import noted_names
from infra.archive.merged_segments import (
    MergedPlace,
    MergedSegment,
    merged_key,
    merged_pattern,
    merged_places,
)
from infra.archive.segments import (
    ARCHIVES,
    LARGEST_SEGMENT,
    ArchivedSpan,
    ArchiveFile,
    FilePart,
    Segment,
    file_key,
    segment_bytes,
    segment_key,
)
from infra.stores.store import Exists, Missing

_FAN = 16  # segments that become one
_LARGE_BYTES = 16 << 20  # of records: a file with so many is never written again
_MOST_BYTES = 32 << 20  # of records in a merged file: as much as in a window, so it fits in memory as well
_MOST_ROWS = 1 << 16
_MOST_NAMED = LARGEST_SEGMENT // 2  # bytes of segments that become one: so that names as many files as it may
_KEPT_S = 24 * 3600.0  # for queries that are under way
_LARGEST_NOTE = 16 << 20


class ArchiveMerger:
    """Merges segments of one run's archive."""

    def __init__(self, index: ArchiveIndex, *, fan: int = _FAN, kept_s: float = _KEPT_S) -> None:
        """`fan`: how many become one. `kept_s`: for how long files stay that were merged into others."""
        self._index, self._store, self._run = index, index.store, index.run
        self._fan, self._kept_s = fan, kept_s

    def merge(self, *, now: float, stop: Callable[[], bool] = lambda: False) -> int:
        """Merge what can be merged, and remove files whose time is over. Return how many merges there were.

        `stop`: asked between two merges whether to end early.
        """
        there, done = set(merged_places(self._store, self._run)), 0
        count, width = self._index.count(), self._fan
        while width <= count:
            for first in range(0, count - width + 1, width):
                place, part = (first, first + width - 1), width // self._fan
                parts = [(at, at + part - 1) for at in range(first, first + width, part)]
                if place in there or not (part == 1 or there.issuperset(parts)):
                    continue
                if stop():
                    return done
                if self._merge_one(place, parts, now):
                    there.add(place)
                    done += 1
            width *= self._fan
        self._remove(now)
        return done

    def _merge_one(self, place: MergedPlace, parts: Sequence[MergedPlace], now: float) -> bool:
        """Merge some segments; return False if records between them are gone, or one has no room for all."""
        if sum(self._store.size(self._key(one)) for one in parts) > _MOST_NAMED:
            return False
        segments = [self._index.at(one) for one in parts]
        spans = _spans(segments)
        if spans is None:
            return False
        files: list[ArchiveFile] = []
        for short in KINDS:
            own = [file for segment in segments for file in segment.files if file.topic == short]
            files += [self._merged_file(place, group) for group in _groups(own)]
        found = MergedSegment(
            format=1, run=self._run, identity=segments[-1].identity, number=place[1], made_at=now,
            spans=spans, files=tuple(files), first=place[0],
        )  # fmt: skip
        kept = {file.name for file in files}
        gone = [file.name for segment in segments for file in segment.files if file.name not in kept]
        note = f"{ARCHIVES}/{self._run}/merged-away/{int(now):012d}-{place[0]:08d}-{place[1]:08d}.json"
        self._store.put(note, json.dumps(gone).encode())
        with suppress(Exists):  # another one has merged the same
            self._store.put_new(merged_key(self._run, place), segment_bytes(found, self._index.ring))
        return True

    def _key(self, place: MergedPlace) -> str:
        return segment_key(self._run, place[0]) if place[0] == place[1] else merged_key(self._run, place)

    def _merged_file(self, place: MergedPlace, group: Sequence[ArchiveFile]) -> ArchiveFile:
        """Write the records of some files as one; return a file by itself as it is."""
        import pyarrow as pa

        from infra.archive.columns import OFFSET, PARTITION
        from infra.archive.parquet_files import check_digest, parquet_bytes, read_table

        if len(group) == 1:
            return group[0]
        kind, tables = KINDS[group[0].topic], list[Any]()
        for file in group:
            key = file_key(self._run, file)
            where = f"{self._store.url}/{key}"
            raw = self._store.get(key, file.size)
            check_digest(raw, file, where)
            tables.append(read_table(raw, file, kind, where))
        table = pa.concat_tables(tables, promote_options="default")
        table = table.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
        content = parquet_bytes(table.combine_chunks())
        digest = str(blake3(content).hexdigest())
        numbers = f"{place[0]:08d}-{place[1]:08d}"
        merged = ArchiveFile(
            topic=group[0].topic, name=f"{group[0].topic}/{_folder(group)}/{numbers}-{digest[:16]}.parquet",
            size=len(content), digest=digest, record_bytes=sum(file.record_bytes for file in group),
            parts=_parts(group),
        )  # fmt: skip
        self._store.put(file_key(self._run, merged), content)
        return merged

    def _remove(self, now: float) -> None:
        """Remove files that were merged into others, once their time is over."""
        folder = f"{ARCHIVES}/{self._run}/merged-away"
        for key in self._store.list(folder):
            found = re.fullmatch(rf"{re.escape(folder)}/(\d{{12}})-(\d{{8,18}})-(\d{{8,18}})\.json", key)
            if found is None or int(found[1]) + self._kept_s > now:
                continue
            place = int(found[2]), int(found[3])
            with suppress(Missing):  # it was never committed: its files are still needed
                merged = self._index.at(place)
                kept = {file.name for file in merged.files}
                for name in noted_names(self._store, key, _LARGEST_NOTE):
                    about = re.fullmatch(merged_pattern(), name)
                    if about and name not in kept and place[0] <= int(about["first"]) <= place[1]:
                        self._store.delete(f"{ARCHIVES}/{self._run}/{name}")
            self._store.delete(key)


def _spans(segments: Sequence[Segment]) -> tuple[ArchivedSpan, ...] | None:
    """Return how far each partition goes in all segments; None if records between them are gone."""
    begins: dict[tuple[str, int], int] = {}
    for segment in segments:
        for span in segment.spans:
            begins.setdefault((span.topic, span.partition), span.begin)
    last = segments[-1].spans
    if any(one.since > begins[one.topic, one.partition] for one in last):
        return None
    return tuple(one.model_copy(update={"begin": begins[one.topic, one.partition]}) for one in last)


def _groups(files: Sequence[ArchiveFile]) -> Iterator[list[ArchiveFile]]:
    """Yield the files of a topic in groups, each of which becomes one file."""
    group: list[ArchiveFile] = []
    for file in files:
        if file.record_bytes >= _LARGE_BYTES:
            yield [file]
            continue
        size, rows = sum(one.record_bytes for one in group), sum(one.rows for one in group)
        if group and (size + file.record_bytes > _MOST_BYTES or rows + file.rows > _MOST_ROWS):
            yield group
            group = []
        group.append(file)
    if group:
        yield group


def _folder(group: Sequence[ArchiveFile]) -> str:
    """Return the folder of a merged file: that of all its files, or of none."""
    folders = {file.name.split("/")[1] for file in group}
    if len(folders) == 1:
        return folders.pop()
    numbered = sorted(one for one in folders if one.startswith("offset="))
    return numbered[0] if numbered else "iteration=mixed"


def _parts(group: Sequence[ArchiveFile]) -> tuple[FilePart, ...]:
    found: dict[int, FilePart] = {}
    for part in (part for file in group for part in file.parts):
        before = found.get(part.partition, part)
        rows = part.rows + (before.rows if part.partition in found else 0)
        found[part.partition] = FilePart(
            partition=part.partition, first=min(before.first, part.first), last=max(before.last, part.last),
            rows=rows,
        )  # fmt: skip
    return tuple(found[number] for number in sorted(found))
