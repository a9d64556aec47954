"""Feeds a run's trackers from the files in its folder, each in a thread of its own.

metrics.jsonl ─────┬──► thread of a tracker ──► tracker.step()   a tracker that is slow or fails stops nothing
evaluations.jsonl ─┘         └──► trackers/NAME.json: the last step that it has, for the next start
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.trackers.tracker import (
    EvaluationTracker,
    RecallingTracker,
    TrackedRun,
    Tracker,
    TrackerSettings,
)
from flows.view.line_files import METRICS_FILE, lines_of
from flows.view.process_notes import EVALUATIONS_FILE
from infra.files.writing import write_whole
from infra.runs import RunRecord
from schemas.importing import BadImport, said
from schemas.tracking import TRACKERS, TrackerSection

LOOK_S = 1.0
RETRY_S = 10.0
_LATE = 64  # evaluations of so many newer versions may come before that of a version
LAST_S = 30.0  # time for a tracker to take what is left when the run ends


@contextmanager
def tracking(record: RunRecord, folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Feed the trackers of a run while the block lasts. `say` gets a line if one fails."""
    end = threading.Event()
    run = TrackedRun(record.id, record.spec, folder, record.identity)
    feeds = [_Feed(section, name, run, end, say) for name, section in _named(record.spec.trackers)]
    for feed in feeds:
        feed.start()
    try:
        yield
    finally:
        end.set()
        until = time.monotonic() + LAST_S
        for feed in feeds:
            feed.join(until)


def _named(sections: list[TrackerSection]) -> Iterator[tuple[str, TrackerSection]]:
    """Yield each tracker with a name of its own."""
    known: dict[str, int] = {}
    for section in sections:
        known[section.kind] = number = known.get(section.kind, 0) + 1
        yield section.kind if number == 1 else f"{section.kind}-{number}", section


class _Feed:
    """Feeds one tracker in a thread."""

    def __init__(
        self, section: TrackerSection, name: str, run: TrackedRun, end: threading.Event,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._section, self._name, self._run, self._end, self._say = section, name, run, end, say
        self._rows, self._evaluations = _Rows(run.folder / METRICS_FILE), _Rows(run.folder / EVALUATIONS_FILE)
        self._position = run.folder / "trackers" / f"{name}.json"
        self._troubled = False
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, until: float) -> None:
        """Wait until the tracker has taken all and is closed."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._say(f"tracker {self._name} did not end within {LAST_S:g} s: it may lack the last steps")

    def _feed(self) -> None:
        while True:
            last_look = self._end.is_set()
            try:
                self._follow()
                return
            except BadImport as error:
                self._say(f"tracker {self._name}: {error}")
                return
            except Exception as error:  # whatever a tracker raises: the run goes on, and it is tried again
                if not self._troubled:
                    self._say(f"tracker {self._name} failed, and is tried again: {said(error)}")
                self._troubled = True
            if last_look:
                return
            self._end.wait(RETRY_S)

    def _follow(self) -> None:
        settings = TRACKERS.loaded(self._section)
        assert isinstance(settings, TrackerSettings)
        had = self._had()
        tracker = settings.make(replace(self._run, last_step=had.step))
        try:
            if isinstance(tracker, RecallingTracker) and (newest := tracker.newest_step()) is not None:
                if newest < had.step:
                    had = _Had(newest)  # evaluations behind it may be missing as well
                self._rows, self._evaluations = self._rows.again(), self._evaluations.again()
            while True:
                ending = self._end.is_set()
                self._give(tracker, had)
                if ending:
                    return
                self._end.wait(LOOK_S)
        finally:
            tracker.close()

    def _give(self, tracker: Tracker, had: _Had) -> None:
        """Give the tracker all that it has not had."""
        before = asdict(had)
        for row in self._rows.new():
            if isinstance(step := row.get("step"), int) and step > had.step:
                tracker.step(row)
                had.step = step
        for row in self._evaluations.new():
            if isinstance(version := row.get("version"), int) and had.lacks(version):
                if isinstance(tracker, EvaluationTracker):
                    tracker.evaluation(row)
                had.add(version)
        if (now := asdict(had)) != before:
            self._troubled = False
            write_whole(self._position, json.dumps(now) + "\n")

    def _had(self) -> _Had:
        found = next(lines_of(self._position), {})
        step, version = (found.get(name) for name in ("step", "version"))
        versions = found.get("versions")
        return _Had(
            step if isinstance(step, int) else -1,
            version if isinstance(version, int) else -1,
            [one for one in versions if isinstance(one, int)] if isinstance(versions, list) else [],
        )


@dataclass
class _Had:
    """The newest step, and the versions whose evaluations, that a tracker has had."""

    step: int = -1
    version: int = -1  # all up to this one
    versions: list[int] = field(default_factory=list)  # and these: an evaluation may be late

    def lacks(self, version: int) -> bool:
        """Return whether the tracker has not had the evaluation of a version."""
        return version > self.version and version not in self.versions

    def add(self, version: int) -> None:
        """Note that it has had the evaluation of a version."""
        self.versions = sorted([*self.versions, version])
        if len(self.versions) > _LATE:
            self.version = self.versions.pop(0)


class _Rows:
    """The rows of a file that grows, or that another one replaces. A row that was not taken comes again."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._file = path, 0, -1

    def again(self) -> _Rows:
        """Return the same rows, from the first one on."""
        return _Rows(self._path)

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that came since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._offset:
                self._file, self._offset = found.st_ino, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(row := json.loads(line), dict):
                        yield row
                self._offset += len(line)
