"""The causes that the time of each process went to, from the notes of its heartbeats.

A note has the seconds by cause since the process began. So the difference of two notes says all of the time
between them, however many notes in between are left out, and the share that is attributed can be computed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flows.view.metric_rows import Thinned

_POINTS, _LIVES, _CAUSES, _PROCESSES = 1000, 50, 40, 64  # maximum notes of a start, starts, and so on

Cumulated = dict[str, float]


@dataclass
class Life:
    """One start of a process: moments, each with the seconds by cause up to then."""

    pid: int
    begin: float
    first: tuple[float, Cumulated]
    last: tuple[float, Cumulated]
    kept: Thinned[tuple[float, Cumulated]] = field(default_factory=lambda: Thinned(_POINTS))

    def add(self, at: float, causes: Cumulated) -> None:
        """Add a later note."""
        if at > self.last[0]:
            self.last = at, causes
            self.kept.add(self.last)

    def points(self) -> list[tuple[float, Cumulated]]:
        """Return its moments in order, from the beginning to the last note."""
        found = [(self.begin, Cumulated()), self.first, *self.kept.kept, self.last]
        return [one for number, one in enumerate(found) if not number or one[0] > found[number - 1][0]]

    def columns(self, edges: np.ndarray) -> dict[str, np.ndarray]:
        """Return, by cause, the seconds between each two neighbours of `edges`."""
        points = self.points()
        at = np.array([when for when, _ in points])
        found = {}
        for cause in self.last[1]:
            total = np.maximum.accumulate([causes.get(cause, 0.0) for _, causes in points])
            found[cause] = np.diff(np.interp(edges, at, total))
        return found

    def noted_s(self) -> tuple[float, float]:
        """Return the seconds between the first and last note: those that have a cause, and all."""
        wall = self.last[0] - self.first[0]
        found = sum(self.last[1].values()) - sum(self.first[1].values())
        return min(wall, max(0.0, found)), wall


class ProcessTime:
    """The starts of one process, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives: list[Life] = []

    def add(self, pid: int, at: float, causes: Cumulated) -> None:
        """Add a note."""
        if self.lives and self.lives[-1].pid == pid:
            self.lives[-1].add(at, causes)
        elif not self.lives or at > self.lives[-1].last[0]:
            note = at, causes
            self.lives = [*self.lives[-_LIVES + 1 :], Life(pid, at - sum(causes.values()), note, note)]

    def totals(self) -> Counter[str]:
        """Return the seconds by cause over all starts."""
        found: Counter[str] = Counter()
        for life in self.lives:
            found.update(life.last[1])
        return found

    def attributed(self) -> float | None:
        """Return the share of the time between first and last notes that has a cause; None if unknown.

        The time between two starts belongs to no process, and is left out.
        """
        known, wall = (sum(side) for side in zip(*(life.noted_s() for life in self.lives), strict=True))
        return known / wall if wall > 0 else None

    @property
    def begin(self) -> float:
        """The moment at which its first start began."""
        return self.lives[0].begin

    @property
    def end(self) -> float:
        """The moment of its last note."""
        return self.lives[-1].last[0]


class TimeUse:
    """The time of all processes of a run. Takes notes of `processes.jsonl` in order."""

    def __init__(self) -> None:
        self._found: dict[str, ProcessTime] = {}
        self._more: set[str] = set()
        self.unattributed = 0  # notes that say no causes: of an older version

    def add(self, note: dict[str, Any]) -> None:
        """Add a note. One that makes no sense is left out."""
        name, at, causes = note.get("process"), note.get("at"), note.get("causes")
        if not isinstance(name, str) or not isinstance(at, int | float) or not math.isfinite(at):
            return
        if not isinstance(causes, dict) or not causes:
            self.unattributed += 1
            return
        if name not in self._found and len(self._found) >= _PROCESSES:
            if len(self._more) < 10_000:
                self._more.add(name)
            return
        seconds = {
            str(cause)[:80]: float(value) for cause, value in list(causes.items())[:_CAUSES] if _fine(value)
        }
        pid = note.get("pid")
        self._found.setdefault(name, ProcessTime(name)).add(pid if isinstance(pid, int) else 0, at, seconds)

    @property
    def left_out(self) -> int:
        """How many processes are not held."""
        return len(self._more)

    def side_shares(self, role: str) -> dict[str, float]:
        """Return the share of the time by cause of all processes of a role, without starts and ends."""
        seconds: Counter[str] = Counter()
        for process in self._found.values():
            if process.name.startswith(role):
                seconds.update(process.totals())
        for cause in ("starting", "ended"):
            del seconds[cause]
        whole = sum(seconds.values())
        return {cause: value / whole for cause, value in seconds.items()} if whole > 0 else {}

    def processes(self) -> list[ProcessTime]:
        """Return the processes: the trainer first, then the others by name and number."""
        return [self._found[name] for name in sorted(self._found, key=_place)]


def _fine(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _place(name: str) -> tuple[int, str, int]:
    role, _, number = name.rpartition("-")
    order = ("trainer", "generator", "feeder", "relay")
    return order.index(role) if role in order else len(order), role, int(number) if number.isdigit() else 0
