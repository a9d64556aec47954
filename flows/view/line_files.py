"""Files in a run's folder that get a line at a time, so that a process that dies loses nothing.

metrics.jsonl   one line for each optimizer step, with the ledger's offset behind it: a process that goes on
                with the file reads the ledger from there
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.view.metric_rows import MetricRow, step_row, with_rates
from flows.view.plain_json import plain_json
from infra.bus import Bus, Record, read_until
from infra.gate import Gate, passed_over
from schemas.messages import StepRecord
from schemas.topics import Topics

METRICS_FILE = "metrics.jsonl"
BEHIND = "ledger"  # key of a line: the offset behind its record in the ledger
_TAIL = 1 << 16
_READ_S = 60.0
_Found = tuple[Record, StepRecord] | dict[str, Any]  # a step in the ledger, or its line in a file


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each line that is a whole JSON object. Lines that were torn, as by a full disk, are left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(line), dict):
                    yield found


class LinesFile:
    """A file to which whole lines are appended. A line that an error tore is cut off before the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size: int | None = None  # bytes up to the end of the last whole line; None: not known yet

    def append(self, line: str) -> None:
        """Append a line. After an OSError the file is as it was, or its last line is torn."""
        with self._opened() as file:
            os.ftruncate(file, self._whole(file))
            data = line.encode() + b"\n"
            written = os.pwrite(file, data, self._whole(file))
            if written < len(data):
                os.ftruncate(file, self._whole(file))
                raise OSError(f"{self.path}: the disk took {written} of {len(data)} bytes")
            self._size = self._whole(file) + written

    def last(self) -> dict[str, Any] | None:
        """Return the last whole line; None if there is none, or if it is no JSON object."""
        with self._opened() as file:
            end = self._whole(file)
            data = os.pread(file, min(end, _TAIL), max(0, end - _TAIL))
        with contextlib.suppress(ValueError, RecursionError, IndexError):
            found = json.loads(data.splitlines()[-1])
            return found if isinstance(found, dict) else None
        return None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield file
        finally:
            os.close(file)

    def _whole(self, file: int) -> int:
        """Return the bytes up to the end of the last whole line."""
        if self._size is None or self._size > os.fstat(file).st_size:
            end = os.fstat(file).st_size
            while end:
                begin = max(0, end - _TAIL)
                if (found := os.pread(file, end - begin, begin).rfind(b"\n")) >= 0:
                    end = begin + found + 1
                    break
                end = begin
            self._size = end
        return self._size


class MetricsFile:
    """The file `metrics.jsonl`, which grows with the ledger."""

    def __init__(self, path: Path) -> None:
        self._file = LinesFile(path)
        self._last: MetricRow | None = None
        self.position: int | None = None  # the ledger's offset behind the last step kept; None: not known

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._file.path

    def open(self) -> None:
        """Find out which step is the file's last. Raises OSError."""
        self._last, self.position = None, None
        found = self._file.last()
        if found is None or not {"step", "finished_at", "trainer_epoch", "samples", "tokens"} <= found.keys():
            return
        self._last = found
        if isinstance(found.get(BEHIND), int):
            self.position = found[BEHIND]

    def put(self, row: MetricRow) -> None:
        """Append a line of another such file, unless its step is kept already. Raises OSError."""
        if self._last is None or int(row["step"] or 0) > int(self._last["step"] or 0):
            self._file.append(plain_json(row))
            self._last = row

    def take(self, record: Record, step: StepRecord) -> None:
        """Append a step, unless it is kept already: the first record of a step counts. Raises OSError."""
        if self.position is not None and record.offset < self.position:
            return
        if self._last is None or step.step > int(self._last["step"] or 0):
            row = step_row(step)
            with_rates([row] if self._last is None else [dict(self._last), row])
            row[BEHIND] = record.offset + 1
            self._file.append(plain_json(row))
            self._last = row
        self.position = record.offset + 1


def complete(
    metrics: MetricsFile, bus: Bus, topics: Topics, run: str, *, deadline_s: float = _READ_S
) -> None:
    """Add the steps that the file lacks. Reads only the ledger's end, unless steps in between are missing."""
    metrics.open()
    if metrics.position is not None and _is_whole(metrics.path):
        for record, step in _ledger(bus, topics, run, metrics.position, deadline_s):
            metrics.take(record, step)
        return
    whole = MetricsFile(metrics.path.with_suffix(".new"))
    whole.path.unlink(missing_ok=True)
    rows: Iterator[_Found] = (row for row in lines_of(metrics.path) if isinstance(row.get("step"), int))
    steps: Iterator[_Found] = _ledger(bus, topics, run, 0, deadline_s)
    for found in heapq.merge(steps, rows, key=_step):
        if isinstance(found, dict):
            whole.put(found)
        else:
            whole.take(*found)
    if whole.path.exists():
        whole.path.replace(metrics.path)
    metrics.open()


def _step(found: _Found) -> int:
    return int(found["step"]) if isinstance(found, dict) else found[1].step


def _is_whole(path: Path) -> bool:
    """Whether the file has a line for each step up to its last one."""
    count, last = 0, -1
    for row in lines_of(path):
        count, last = count + 1, row.get("step", -1)
    return count == last + 1


def _ledger(
    bus: Bus, topics: Topics, run: str, start: int, deadline_s: float
) -> Iterator[tuple[Record, StepRecord]]:
    """Yield the ledger's steps from an offset, or from its oldest record, up to its end as it is now."""
    reader = bus.reader(topics.ledger, {0: 0})
    try:
        begin, ends = reader.begin_offsets()[0], reader.end_offsets()
        reader.seek({0: max(begin, start)})
        gate = Gate(StepRecord, run, passed_over)
        yield from gate.take(read_until(reader, ends, topics.ledger, deadline_s=deadline_s))
    finally:
        reader.close()
