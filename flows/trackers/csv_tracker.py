"""The tracker `csv`: a table of all steps that spreadsheets open."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from flows.trackers.tracker import TrackedRun, TrackerSettings
from flows.view.line_files import LinesFile
from flows.view.metric_rows import MetricRow
from infra.files.writing import write_whole


class CsvSettings(TrackerSettings):
    """Settings of csv."""

    def make(self, run: TrackedRun) -> CsvTracker:
        return CsvTracker(run.folder / "metrics.csv")


class CsvTracker:
    """The file grows by a line a step. A step with a metric that no step had before writes it anew."""

    def __init__(self, path: Path) -> None:
        rows = list(csv.DictReader(_whole_lines(path)))
        self._names = list(rows[0]) if rows else []
        self._last = max((int(row["step"]) for row in rows), default=-1)
        self._path, self._lines = path, LinesFile(path)

    def step(self, row: MetricRow) -> None:
        if int(row["step"] or 0) <= self._last:
            return
        if new := [name for name in row if name not in self._names]:
            self._widen(new)
        self._lines.append(_line([row.get(name) for name in self._names]))
        self._last = int(row["step"] or 0)

    def _widen(self, new: list[str]) -> None:
        old = _whole_lines(self._path)[1:]
        self._names += new
        rows = [f"{line}{',' * len(new)}" for line in old]
        write_whole(self._path, "\n".join([_line(self._names), *rows, ""]))
        self._lines = LinesFile(self._path)

    def close(self) -> None: ...


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without a last one that was torn; none if it is not there."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def _line(values: list[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(["" if value is None else value for value in values])
    return text.getvalue()
