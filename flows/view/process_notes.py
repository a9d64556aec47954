"""Notes of a run over time, for its report: topics keep only the newest heartbeats, or nothing of the kind.

processes.jsonl     the heartbeats: counters, and the seconds of each process by cause
queues.jsonl        by length class, how many samples are finished and not trained
evaluations.jsonl   a line for each evaluation
left_out.jsonl      processes that can't be kept alive

The longer a run, the rarer the notes, so that weeks of them are a few megabytes. A full disk costs notes and
nothing else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.view.line_files import LinesFile, lines_of
from flows.view.plain_json import plain_json
from flows.view.run_view import ROWS, RunView

PROCESSES_FILE, LEFT_OUT_FILE = "processes.jsonl", "left_out.jsonl"
QUEUES_FILE, EVALUATIONS_FILE = "queues.jsonl", "evaluations.jsonl"
_EVERY_S, _SHARE = 1.0, 0.001  # minimum time between notes: seconds, and a share of the run's age
_MOST = 24  # maximum processes that are noted while the run goes on; at its end all are


class ProcessNotes:
    """Files that the flow writes, with lines every now and then."""

    def __init__(self, folder: Path, began_at: float, say: Callable[[str], None]) -> None:
        self._began_at, self._say = began_at, say
        self._processes = LinesFile(folder / PROCESSES_FILE)
        self._left_out, self._known = LinesFile(folder / LEFT_OUT_FILE), dict[str, str]()
        self._queues = LinesFile(folder / QUEUES_FILE)
        self._evaluations = LinesFile(folder / EVALUATIONS_FILE)
        self._evaluated = deque[float | None](maxlen=ROWS)  # the newest versions in it: a view holds no more
        with suppress(OSError):  # what was noted before a resume is not noted again
            rows = lines_of(self._evaluations.path)
            self._evaluated.extend(one for row in rows if isinstance(one := row.get("version"), int))
        self._next, self._said = 0.0, ""

    def note(self, view: RunView) -> None:
        """Write a line for each process that is alive, at most 24 of them, if it is time."""
        if time.monotonic() >= self._next:
            age = max(0.0, time.time() - self._began_at)
            self._next = time.monotonic() + max(_EVERY_S, _SHARE * age)
            alive = [name for name, process in view.processes.items() if process.alive]
            self._write(view, sorted(alive, key=_rank)[:_MOST])
            self._note_stream(view)

    def note_all(self, view: RunView) -> None:
        """Write a line for every process, with its last heartbeat."""
        self._write(view, sorted(view.processes))
        self._note_stream(view)

    def _note_stream(self, view: RunView) -> None:
        if (lag := view.lag()) is not None and view.last:
            self._append(self._queues, [{"at": time.time(), "step": view.last["step"], "lag": lag}])
        known = set(self._evaluated)
        fresh = {row["version"]: row for row in view.evaluations if row["version"] not in known}
        self._append(self._evaluations, list(fresh.values()))
        self._evaluated.extend(fresh)

    def left_out(self, found: Mapping[str, str]) -> None:
        """Write changes in which processes are left out, and why. The report names those of the end."""
        if found == self._known:
            return
        changed = {name: found.get(name, "") for name in {*found, *self._known}}
        self._append(self._left_out, [{"process": name, "why": why} for name, why in sorted(changed.items())])
        self._known = dict(found)

    def _write(self, view: RunView, names: Sequence[str]) -> None:
        step = view.last["step"] if view.last else None
        notes = []
        for name in names:
            process = view.processes[name]
            note = {"at": process.beat.sent_at, "process": name, "step": step, "idle": process.idle_share}
            note |= {"cpu": process.cpu.per_s, "counters": process.beat.counters}
            causes = {cause: round(seconds, 3) for cause, seconds in process.beat.causes.items()}
            notes.append(note | {"pid": process.beat.pid, "host": process.beat.host, "causes": causes})
        self._append(self._processes, notes)

    def _append(self, file: LinesFile, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            for row in rows:
                file.append(plain_json(row))
        except OSError as error:
            if not self._said:
                self._said = str(error)
                self._say(f"{file.path} can't be written, and the run goes on without it: {error}")


def _rank(name: str) -> tuple[bool, int, str]:
    """Return the key by which the few processes that everything depends on come first."""
    return name.startswith(("generator", "relay")), len(name), name
