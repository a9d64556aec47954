"""Who waits, who runs where, and how far: all that a policy decides by."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from producers.dispatch.jobs import SampleJob, Turn
from schemas.identity import SampleKey

NO_DEADLINE = 1e300  # of a plan: longest first


@dataclass(eq=False)
class Instance:
    """One engine. Its steps are counted on by its latency curve between two reports."""

    name: str
    slots: int
    seconds: np.ndarray  # of a step, by the number of samples in it: 0 .. slots
    now: float
    running: dict[SampleKey, SampleJob] = field(default_factory=dict)
    steps: float = 0.0
    ahead: int = 0  # jobs that it may have beyond its slots
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _began: dict[SampleKey, float] = field(default_factory=dict)  # the step before its first token

    def advance(self, now: float) -> None:
        """Count the steps up to now."""
        if self.running and now > self.now:
            self.steps += (now - self.now) / self.seconds[min(len(self.running), self.slots)]
        self.now = max(now, self.now)

    def start(self, job: SampleJob, tokens: float = 0.0) -> None:
        """It runs a job, which may have tokens already."""
        self.running[job.key] = job
        self._began[job.key] = self.steps - tokens

    def rate(self, now: float) -> float:
        """Jobs a second that it finishes, lately."""
        self._ends.append(now)
        return len(self._ends) / max(now - self._ends[0], 1.0)

    def end(self, key: SampleKey) -> SampleJob | None:
        """It does not run a job any more."""
        self._began.pop(key, None)
        return self.running.pop(key, None)

    def tokens(self, key: SampleKey) -> float:
        """How many tokens a running job has by now."""
        return self.steps - self._began[key]

    def correct(self, key: SampleKey, tokens: float) -> None:
        """A report says how many tokens a job has."""
        if key in self._began:
            self._began[key] = self.steps - tokens

    @property
    def free(self) -> int:
        """How many jobs it may be given; below 0, it has more than it may have."""
        return self.slots + self.ahead - len(self.running)


class Waiting:
    """Jobs that wait, by turn and predicted length."""

    def __init__(self) -> None:
        self._windows: dict[Turn, list[tuple[float, SampleKey]]] = {}  # ascending predicted length
        self._jobs: dict[SampleKey, tuple[SampleJob, float]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[tuple[SampleJob, float]]:
        return iter(self._jobs.values())

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._jobs

    def add(self, job: SampleJob, predicted: float) -> None:
        """A job, and how long it is thought to be."""
        self._jobs[job.key] = job, predicted
        bisect.insort(self._windows.setdefault(job.turn, []), (predicted, job.key))

    def remove(self, key: SampleKey) -> SampleJob:
        """It waits no more."""
        job, predicted = self._jobs.pop(key)
        window = self._windows[job.turn]
        del window[bisect.bisect_left(window, (predicted, key))]
        if not window:
            del self._windows[job.turn]
        return job

    def rerank(self, key: SampleKey, predicted: float) -> None:
        """It is thought to be of another length now."""
        self.add(self.remove(key), predicted)

    def windows(self) -> list[list[tuple[float, SampleKey]]]:
        """For each turn, the first one first: its jobs, the shortest first."""
        return [self._windows[number] for number in sorted(self._windows)]

    def longest(self) -> SampleKey | None:
        """The longest of the oldest window."""
        return self._windows[min(self._windows)][-1][1] if self._windows else None


@dataclass(eq=False)
class Board:
    """The state of a dispatcher."""

    waiting: Waiting = field(default_factory=Waiting)
    instances: dict[str, Instance] = field(default_factory=dict)
    home: dict[SampleKey, str] = field(default_factory=dict)  # the instance that has a job
    _fastest_first: list[Instance] = field(default_factory=list)

    def tokens(self, key: SampleKey) -> float:
        """How many tokens a job has; 0 if it does not run."""
        if key in self.waiting:
            return 0.0
        known = self.instances.get(self.home.get(key, ""))
        if known is not None and key in known.running:
            return known.tokens(key)
        return next((i.tokens(key) for i in self.instances.values() if key in i.running), 0.0)

    @property
    def fastest_first(self) -> Sequence[Instance]:
        """Instances by the time of their shortest step."""
        if not self._fastest_first:
            self._fastest_first = sorted(self.instances.values(), key=lambda i: (i.seconds[1], i.name))
        return self._fastest_first

    def regrouped(self) -> None:
        """Instances have come or gone, or have become faster or slower."""
        self._fastest_first = []
