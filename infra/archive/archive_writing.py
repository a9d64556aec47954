"""Archives what came on a run's topics since the last pass.

log ──► window of records ──► tables ──► files ─┐
          │                     note in pending ┴──► segment: the commit ──► note removed, leftovers with it
          └─ next window, until where the log ended when the pass began

A pass begins where the newest segment ends, so its cost does not depend on what is archived already. It may
be killed anywhere: without its segment a file counts for nothing, and the note says which files to collect
once the segment of that number is there. If two passes go on at once, one of them commits a segment; the
other one's files are collected.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from infra.archive.archive_reading import ArchiveIndex
from infra.archive.archived_topics import BY_ITERATION, KINDS, archived_topics
from infra.archive.file_notes import noted_names
from infra.archive.merging import ArchiveMerger
from infra.archive.segments import (
    ARCHIVES,
    ArchivedSpan,
    ArchiveError,
    ArchiveFile,
    FilePart,
    Segment,
    file_key,
    pattern_of_file,
    segment_bytes,
    segment_key,
)
from infra.bus import Bus, Reader, Record
from infra.errors import Explained
from infra.keys import SIGNING, TRUSTED, ring_from_env
from infra.stores.store import Exists, Store
from infra.waiting import Wait
from schemas.topics import Topics

ArchiveProgress = Callable[[int, int], None]  # records that are archived, of how many
_WINDOW_BYTES = 32 << 20  # of records that are in memory at once
_WINDOW_RECORDS = 1 << 16
_BATCH = 500  # records that are asked for at once
_MOST_ITERATIONS = 64  # of a window that get a file each; a liar's records name as many as they like
_MIXED = "mixed"


@dataclass
class ArchivePass:
    """The result of a pass."""

    records: int = 0
    log_bytes: int = 0  # of these records, in the log
    file_bytes: int = 0
    segments: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # records that retention had removed, by topic
    unreadable: int = 0
    merges: int = 0  # of small segments into larger ones
    unmerged: str = ""  # why small segments could not be merged


_Place = tuple[str, int]  # short name of a topic, and a partition
_LARGEST_NOTE = 1 << 20


class ArchiveWriter:
    """Adds segments to the archive of one run."""

    def __init__(
        self, bus: Bus, store: Store, topics: Topics, run: str, identity: str, *, deadline_s: float,
        window: int = _WINDOW_RECORDS,
    ) -> None:  # fmt: skip
        """`window`: maximum number of records that are in memory at once."""
        self._bus, self._store, self._run, self._identity = bus, store, run, identity
        self._topics, self._deadline_s = archived_topics(topics), deadline_s
        self._window = window
        self._ring = ring_from_env()
        if self._ring.trusts and not self._ring.signs:
            raise ArchiveError(
                f"run {run} can't be archived unsigned: {TRUSTED} is set, so nobody would believe the "
                f"archive; set {SIGNING} too"
            )

    def archive(
        self, *, now: float, progress: ArchiveProgress = lambda done, total: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> ArchivePass:  # fmt: skip
        """Archive all that the log has now. `stop`: asked after each segment whether to end early."""
        index = ArchiveIndex(self._store, self._run, self._identity)
        newest = index.newest()
        number = newest.number + 1 if newest is not None else 0
        spans = {(one.topic, one.partition): one for one in newest.spans} if newest is not None else {}
        done, readers = ArchivePass(), dict[str, Reader]()
        try:
            ends = self._open(spans, readers, done)
            total = sum(end - spans[place].end for place, end in ends.items())
            for window in self._windows(dict(reversed(readers.items())), ends):
                spans = {
                    (topic, part): ArchivedSpan(
                        topic=topic, partition=part, since=one.since, begin=one.end,
                        end=window.reached.get((topic, part), one.end),
                    )
                    for (topic, part), one in spans.items()
                }  # fmt: skip
                self._commit(number, window, list(spans.values()), done, now)
                number += 1
                progress(done.records, total)
                if stop():
                    break
        finally:
            for reader in readers.values():
                reader.close()
        self.collect(index)
        if not stop():
            try:
                done.merges = ArchiveMerger(index).merge(now=now, stop=stop)
            except Explained as error:  # all is archived, and a query only takes longer
                done.unmerged = str(error)
        return done

    def _open(
        self, spans: dict[_Place, ArchivedSpan], readers: dict[str, Reader], done: ArchivePass
    ) -> dict[_Place, int]:
        """Open the topics that have something new; return where each of their partitions ends now.

        Where retention was quicker than the archive, the partition's span begins anew. The ledger is asked
        before the samples: so all samples of its steps are archived before it is.
        """
        ends: dict[_Place, int] = {}
        there = self._bus.topic_names()
        for short, topic in reversed(self._topics.items()):
            if topic.name not in there:
                continue
            begun = {
                part: spans[short, part].end for part in range(topic.partitions) if (short, part) in spans
            }
            reader = readers[short] = self._bus.reader(topic, begun)
            begins, now = reader.begin_offsets(), reader.end_offsets()
            for part, begin in begins.items():
                before = spans.get((short, part))
                if before is not None and now[part] < before.end:
                    raise ArchiveError(
                        f"{topic.name}[{part}] ends at {now[part]}, and is archived up to {before.end}: the "
                        "topic was made anew since, so its records can't be added to this archive"
                    )
                if before is None or before.end < begin:
                    if gone := begin - (before.end if before is not None else 0):
                        done.lost[short] = done.lost.get(short, 0) + gone
                    spans[short, part] = ArchivedSpan(
                        topic=short, partition=part, since=begin, begin=begin, end=begin
                    )
            new = {part: end for part, end in now.items() if end > spans[short, part].end}
            if not new:
                readers.pop(short).close()
                continue
            reader.seek({part: spans[short, part].end for part in begins})
            ends |= {(short, part): end for part, end in new.items()}
        return ends

    def _windows(
        self, readers: Mapping[str, Reader], ends: Mapping[_Place, int]
    ) -> Iterator[_Window]:  # fmt: skip
        """Yield all records up to `ends`, in windows that fit in memory."""
        window = _Window()
        for short, reader in readers.items():
            left = {part: end for (topic, part), end in ends.items() if topic == short}
            wait = Wait(
                f"records of {self._topics[short].name}", unblocked_by="the Kafka broker",
                deadline_s=self._deadline_s,
            )  # fmt: skip
            while left:
                batch = reader.poll(0.2, min(_BATCH, self._window - window.count))
                wait.progress() if batch else wait.check()
                for record in batch:
                    part = record.partition
                    if record.offset < ends.get((short, part), 0):
                        window.add(short, record)
                positions = reader.positions()
                for part in [part for part, end in left.items() if positions[part] >= end]:
                    window.reached[short, part] = left.pop(part)  # there may be no record just before it
                if window.size >= _WINDOW_BYTES or window.count >= self._window:
                    yield window
                    window = _Window()
        if window.reached:
            yield window

    def _commit(
        self, number: int, window: _Window, spans: list[ArchivedSpan], done: ArchivePass, now: float
    ) -> None:
        files = list(_files(window, number, done))
        segment = Segment(
            format=1, run=self._run, identity=self._identity, number=number, made_at=now, spans=tuple(spans),
            files=tuple(file for file, _ in files),
        )  # fmt: skip
        raw = segment_bytes(segment, self._ring)
        note = f"{ARCHIVES}/{self._run}/pending/{number:08d}-{uuid.uuid4().hex}.json"
        self._store.put(note, json.dumps([file.name for file in segment.files]).encode())
        for file, content in files:
            self._store.put(file_key(self._run, file), content)
        key = segment_key(self._run, number)
        try:
            self._store.put_new(key, raw)
        except Exists:
            if self._store.get(key, len(raw)) != raw:  # else a server said so of our own write
                raise ArchiveError(
                    f"another pass over run {self._run} goes on, and has committed segment {number} first"
                ) from None
        self._store.delete(note)
        done.segments += 1
        done.records += window.count
        done.log_bytes += window.size
        done.file_bytes += sum(file.size for file in segment.files)

    def collect(self, index: ArchiveIndex) -> int:
        """Remove files that passes have left which did not commit them; return how many there were."""
        found = 0
        folder = f"{ARCHIVES}/{self._run}/pending"
        for key in self._store.list(folder):
            about = re.fullmatch(rf"{re.escape(folder)}/(\d{{8,18}})-[0-9a-f]{{32}}\.json", key)
            if about is None or int(about[1]) >= index.count():
                continue  # the pass that wrote it may still be at work
            number = int(about[1])
            kept = {file.name for file in index.segment(number).files}
            for name in noted_names(self._store, key, _LARGEST_NOTE):
                if name not in kept and re.fullmatch(pattern_of_file(number), name):
                    self._store.delete(f"{ARCHIVES}/{self._run}/{name}")
                    found += 1
            self._store.delete(key)
        return found


@dataclass
class _Window:
    """Records that are committed together."""

    records: dict[str, list[Record]] = field(default_factory=dict)
    reached: dict[_Place, int] = field(default_factory=dict)
    size: int = 0
    count: int = 0

    def add(self, short: str, record: Record) -> None:
        self.records.setdefault(short, []).append(record)
        self.reached[short, record.partition] = record.offset + 1
        self.size += len(record.key) + len(record.value)
        self.count += 1


def _files(window: _Window, number: int, done: ArchivePass) -> Iterator[tuple[ArchiveFile, bytes]]:
    """Yield the files of a window with their content."""
    import numpy as np
    import pyarrow as pa

    from infra.archive.columns import FAULT, OFFSET, PARTITION, to_table
    from infra.archive.parquet_files import parquet_bytes

    for short, records in window.records.items():
        records.sort(key=lambda one: (one.partition, one.offset))
        some = (records[first : first + _BATCH] for first in range(0, len(records), _BATCH))
        table = pa.concat_tables(to_table(batch, KINDS[short]) for batch in some)  # few messages at once
        done.unreadable += len(records) - table[FAULT].null_count
        partitions, offsets = table[PARTITION].to_numpy(), table[OFFSET].to_numpy()
        sizes = np.array([len(one.key) + len(one.value) for one in records])
        for folder, rows in _folders(table, short, int(offsets.min())):
            content = parquet_bytes(table.take(rows))
            digest = str(blake3(content).hexdigest())
            parts = []
            for part in np.unique(partitions[rows]).tolist():
                own = offsets[rows][partitions[rows] == part]
                parts.append(
                    FilePart(partition=part, first=int(own[0]), last=int(own[-1]), rows=int(own.size))
                )
            file = ArchiveFile(
                topic=short, name=f"{short}/{folder}/{number:08d}-{digest[:16]}.parquet", size=len(content),
                digest=digest, record_bytes=int(sizes[rows].sum()), parts=tuple(parts),
            )  # fmt: skip
            yield file, content


def _folders(table: Any, short: str, first: int) -> Iterator[tuple[str, Any]]:
    """Yield the folders over which the rows of a window are spread, each with its rows."""
    import numpy as np

    if short not in BY_ITERATION:
        yield f"offset={first:012d}", np.arange(table.num_rows)
        return
    of_each = np.array([-1 if one is None else one for one in table["iteration"].to_pylist()])
    counts = Counter(of_each.tolist())
    own = {number for number, _ in counts.most_common(_MOST_ITERATIONS) if number >= 0}
    for number in sorted(own):
        yield f"iteration={number:06d}", np.flatnonzero(of_each == number)
    rest = np.flatnonzero(~np.isin(of_each, list(own)))
    if rest.size:
        yield f"iteration={_MIXED}", rest
