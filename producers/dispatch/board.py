"""The board: which jobs wait, which generator runs which job, and how far. Dispatch policies decide by it."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from producers.dispatch.jobs import SampleJob, Turn
from schemas.identity import SampleKey

NO_DEADLINE = 1e300  # as a plan's deadline: no deadline, so longest first


@dataclass(eq=False)
class BoardGenerator:
    """A generator. Between two reports its decode steps are estimated by its latency curve."""

    name: str
    slots: int
    seconds: np.ndarray  # of a step, by the number of samples in it, 0 to `slots`
    now: float
    running: dict[SampleKey, SampleJob] = field(default_factory=dict)
    steps: float = 0.0
    ahead: int = 0  # jobs that it may be given beyond its slots
    _ends: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _began: dict[SampleKey, float] = field(default_factory=dict)  # `steps` at the time of its first token

    def advance(self, now: float) -> None:
        """Add the steps that the generator has made since the last call."""
        if self.running and now > self.now:
            self.steps += (now - self.now) / self.seconds[min(len(self.running), self.slots)]
        self.now = max(now, self.now)

    def start(self, job: SampleJob, tokens: float = 0.0) -> None:
        """Add a job to the running ones; `tokens`: how many it has already."""
        self.running[job.key] = job
        self._began[job.key] = self.steps - tokens

    def rate(self, now: float) -> float:
        """Note that a job has finished. Return how many finish a second, over the last 64."""
        self._ends.append(now)
        return len(self._ends) / max(now - self._ends[0], 1.0)

    def end(self, key: SampleKey) -> SampleJob | None:
        """Remove a job and return it; None if the generator does not have it."""
        self._began.pop(key, None)
        return self.running.pop(key, None)

    def tokens(self, key: SampleKey) -> float:
        """Return how many tokens a running job has by now, as estimated."""
        return self.steps - self._began[key]

    def correct(self, key: SampleKey, tokens: float) -> None:
        """Set a job's number of tokens, as reported."""
        if key in self._began:
            self._began[key] = self.steps - tokens

    @property
    def free(self) -> int:
        """The number of jobs that it may still be given; negative if it has too many."""
        return self.slots + self.ahead - len(self.running)


class Waiting:
    """Jobs that no generator has, by turn and predicted length."""

    def __init__(self) -> None:
        self._by_turn: dict[Turn, list[tuple[float, SampleKey]]] = {}  # by turn: ascending predicted lengths
        self._jobs: dict[SampleKey, tuple[SampleJob, float]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[tuple[SampleJob, float]]:
        return iter(self._jobs.values())

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._jobs

    def add(self, job: SampleJob, predicted: float) -> None:
        """Add a job with its predicted length."""
        self._jobs[job.key] = job, predicted
        bisect.insort(self._by_turn.setdefault(job.turn, []), (predicted, job.key))

    def remove(self, key: SampleKey) -> SampleJob:
        """Remove a job and return it."""
        job, predicted = self._jobs.pop(key)
        jobs = self._by_turn[job.turn]
        del jobs[bisect.bisect_left(jobs, (predicted, key))]
        if not jobs:
            del self._by_turn[job.turn]
        return job

    def reorder(self, key: SampleKey, predicted: float) -> None:
        """Change a job's predicted length."""
        self.add(self.remove(key), predicted)

    def by_turn(self) -> list[list[tuple[float, SampleKey]]]:
        """Return the jobs by turn, the first turn first; within a turn the shortest job comes first."""
        return [self._by_turn[number] for number in sorted(self._by_turn)]

    def longest(self) -> SampleKey | None:
        """Return the longest job of the first turn; None if no job waits."""
        return self._by_turn[min(self._by_turn)][-1][1] if self._by_turn else None


@dataclass(eq=False)
class Board:
    """The dispatcher's state: waiting jobs, generators, and which generator has which job."""

    waiting: Waiting = field(default_factory=Waiting)
    generators: dict[str, BoardGenerator] = field(default_factory=dict)
    home: dict[SampleKey, str] = field(default_factory=dict)  # the generator that has a job
    _fastest_first: list[BoardGenerator] = field(default_factory=list)

    def tokens(self, key: SampleKey) -> float:
        """Return how many tokens a job has, as estimated; 0 if it does not run."""
        if key in self.waiting:
            return 0.0
        known = self.generators.get(self.home.get(key, ""))
        if known is not None and key in known.running:
            return known.tokens(key)
        return next((i.tokens(key) for i in self.generators.values() if key in i.running), 0.0)

    @property
    def fastest_first(self) -> Sequence[BoardGenerator]:
        """The generators, by the duration of their shortest step."""
        if not self._fastest_first:
            self._fastest_first = sorted(self.generators.values(), key=lambda i: (i.seconds[1], i.name))
        return self._fastest_first

    def regrouped(self) -> None:
        """Forget the order by speed: a generator came, went, or has a new latency curve."""
        self._fastest_first = []
