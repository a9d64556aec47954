"""The files of a run's report folder, as the page reads them: each read takes in only what is new.

It holds no more for a long run than for a short one: rows are thinned evenly.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from flows.page.line_tail import LineTail
from flows.page.time_use import TimeUse
from flows.view.line_files import METRICS_FILE
from flows.view.metric_rows import Thinned
from flows.view.process_notes import EVALUATIONS_FILE, LEFT_OUT_FILE, PROCESSES_FILE, QUEUES_FILE
from flows.view.totals import Totals

SUMMARY_FILE = "summary.json"
PREDICTION_FILE, PREDICTION_PICTURE = "prediction.json", "prediction.png"
_ROWS, _LARGEST, _LARGEST_PICTURE = 4000, 64 << 20, 1 << 20
_PNG = b"\x89PNG\r\n\x1a\n"

Row = dict[str, Any]


class RunFiles:
    """The content of a run's report folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin_metrics()
        self._begin_processes()
        self._begin_evaluations()
        self._begin_queues()
        self.left_out: dict[str, str] = {}
        self._metrics = LineTail(folder / METRICS_FILE, self._begin_metrics)
        self._processes = LineTail(folder / PROCESSES_FILE, self._begin_processes)
        self._evaluations = LineTail(folder / EVALUATIONS_FILE, self._begin_evaluations)
        self._queues = LineTail(folder / QUEUES_FILE, self._begin_queues)

    def _begin_metrics(self) -> None:
        self.rows, self.totals = Thinned[Row](_ROWS), Totals()
        self.last: Row | None = None
        self.keys: dict[str, None] = {}  # names of metrics, in their order

    def _begin_processes(self) -> None:
        self.time, self.counters = TimeUse(), dict[str, Thinned[Row]]()

    def _begin_evaluations(self) -> None:
        self.evaluations = Thinned[Row](_ROWS)

    def _begin_queues(self) -> None:
        self.queues = Thinned[Row](_ROWS)

    def refresh(self) -> None:
        """Take in what has been written since the last call."""
        for row in self._metrics.new_lines():
            self.take_step(row)
        for note in self._processes.new_lines():
            self.time.add(note)
            self._count(note)
        for row in self._evaluations.new_lines():
            if isinstance(row.get("version"), int):
                self.evaluations.add(row)
        for row in self._queues.new_lines():
            if isinstance(row.get("lag"), list) and isinstance(row.get("step"), int):
                self.queues.add(row)
        self.left_out = {}
        for row in LineTail(self.folder / LEFT_OUT_FILE).new_lines():
            self.left_out[str(row.get("process"))[:200]] = str(row.get("why"))[:2000]

    def take_step(self, row: Row) -> None:
        """Take the row of a step, unless one of it or of a later step is here."""
        step = row.get("step")
        if not isinstance(step, int) or (self.last is not None and step <= self.last["step"]):
            return
        self.last = row
        self.rows.add(row)
        with contextlib.suppress(TypeError):
            self.totals.add(row)
        if len(self.keys) < 200 and not row.keys() <= self.keys.keys():
            self.keys |= dict.fromkeys(str(key)[:80] for key in row)

    def _count(self, note: Row) -> None:
        name, counters = str(note.get("process"))[:200], note.get("counters")
        if isinstance(counters, dict) and (name in self.counters or len(self.counters) < 64):
            found = {key: counters[key] for key in _COUNTERS & counters.keys()}
            if found:
                self.counters.setdefault(name, Thinned(_ROWS)).add(found | {"pid": note.get("pid")})


_COUNTERS = {"version", "installs", "pause_s", "published", "published_bytes", "whole_bytes"}


def read_picture(path: Path) -> bytes:
    """Return the PNG in a file; empty if there is none, or one that is too large for a page."""
    with contextlib.suppress(OSError):
        if path.stat().st_size <= _LARGEST_PICTURE and (found := path.read_bytes()).startswith(_PNG):
            return found
    return b""


def read_json(path: Path) -> Row:
    """Return the object in a file; empty if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _LARGEST and isinstance(found := json.loads(path.read_bytes()), dict):
            return found
    return {}
