"""The board: which jobs wait, which generator runs which job, and how far. Dispatch policies decide by it.

Each change costs the same on a thousand generators as on ten: a generator's steps are counted when somebody
asks for them, and the one whose next step is the fastest is kept at the top of a heap.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from producers.dispatch.jobs import SampleJob, Turn
from producers.dispatch.length_order import LengthOrder, OrderedJob, Teller
from schemas.identity import SampleKey

_NEWEST = 1 / 64  # weight of the newest sample's length
NO_DEADLINE = 1e300  # as a plan's deadline: no deadline, so longest first


@dataclass(eq=False)
class BoardGenerator:
    """A generator. Between two reports its decode steps are estimated by its latency curve."""

    name: str
    slots: int
    seconds: np.ndarray  # of a step, by the number of samples in it, 0 to `slots`
    now: float
    running: dict[SampleKey, SampleJob] = field(default_factory=dict)
    steps: float = 0.0  # up to `now`
    ahead: int = 0  # jobs that it may be given beyond its slots
    keeps_bits: bool = False  # whether a sample that it continues has the bits that it would have had
    round_s: float = 0.0  # from a finished sample until a job for its slot can begin; 0: not known
    _ended: int = 0
    _length: float = 0.0  # mean of its newest finished samples
    _began: dict[SampleKey, float] = field(default_factory=dict)  # `steps` at the time of its first token

    def advance(self, now: float) -> None:
        """Add the steps that the generator has made since the last call."""
        if now > self.now:
            if self.running:
                self.steps += (now - self.now) / self.step_s
            self.now = now

    @property
    def step_s(self) -> float:
        """The seconds of a step with the jobs that it has."""
        return float(self.seconds.item(min(len(self.running), self.slots)))

    @property
    def next_step_s(self) -> float:
        """The seconds of a step with one more job."""
        return float(self.seconds.item(min(len(self.running) + 1, self.slots)))

    @property
    def prefill_s(self) -> float:
        """The seconds, at most, to prefill a token: no less efficient than a decode step of a full batch."""
        return float(self.seconds.item(self.slots)) / self.slots

    def start(self, job: SampleJob, tokens: float = 0.0) -> None:
        """Add a job to the running ones; `tokens`: how many it has already."""
        key = job.key
        self.running[key] = job
        self._began[key] = self.steps - tokens

    def ended(self, length: int) -> None:
        """Note that a sample of this length has finished."""
        self._ended += 1
        self._length += max(_NEWEST, 1 / self._ended) * (length - self._length)

    @property
    def answer_s(self) -> float:
        """The seconds of a sample of the mean length in a full batch."""
        return max(1.0, self._length) * float(self.seconds.item(self.slots))

    def end(self, key: SampleKey) -> SampleJob | None:
        """Remove a job and return it; None if the generator does not have it."""
        self._began.pop(key, None)
        return self.running.pop(key, None)

    def tokens(self, key: SampleKey) -> float:
        """Return how many tokens a running job has at the time of the last `advance`, as estimated."""
        return self.steps - self._began[key]

    def tokens_of(self, keys: Iterable[SampleKey]) -> list[float]:
        """Return `tokens` of many jobs."""
        steps, began = self.steps, self._began
        return [steps - began[key] for key in keys]

    def correct(self, key: SampleKey, tokens: float) -> None:
        """Set a job's number of tokens, as reported."""
        if key in self._began:
            self._began[key] = self.steps - tokens

    def clear(self) -> list[SampleJob]:
        """Remove all jobs and return them."""
        jobs = list(self.running.values())
        self.running.clear()
        self._began.clear()
        return jobs

    @property
    def free(self) -> int:
        """The number of jobs that it may still be given; negative if it has too many."""
        return self.slots + self.ahead - len(self.running)


class Waiting:
    """Jobs that no generator has, by turn and predicted length."""

    def __init__(self) -> None:
        self._by_turn: dict[Turn, LengthOrder] = {}
        self._turns: list[Turn] = []  # ascending
        self._orders: list[LengthOrder] = []  # by these turns
        self._jobs: dict[SampleKey, OrderedJob] = {}
        self._tell: Teller | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[tuple[SampleJob, float]]:
        return ((job, length) for length, _, job in self._jobs.values())

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._jobs

    def add(self, job: SampleJob, predicted: float) -> None:
        """Add a job with its predicted length."""
        self.add_all([(predicted, job.key, job)])

    def add_all(self, fresh: Iterable[OrderedJob]) -> None:
        """Add jobs that do not wait yet."""
        turns: dict[Turn, list[OrderedJob]] = {}
        same: list[OrderedJob] = []  # turn as the job before: jobs come group by group
        prompt = None
        for one in fresh:
            self._jobs[one[1]] = one
            if one[2].prompt is not prompt:
                prompt = one[2].prompt
                same = turns.setdefault(one[2].turn, [])
            same.append(one)
        for turn, jobs in turns.items():
            order = self._by_turn.get(turn)
            if order is None:
                order = self._by_turn[turn] = LengthOrder(self._tell)
                place = bisect.bisect_left(self._turns, turn)
                self._turns.insert(place, turn)
                self._orders.insert(place, order)
            order.add(jobs)

    def remove(self, key: SampleKey) -> SampleJob:
        """Remove a job and return it."""
        one = self._jobs.pop(key)
        job = one[2]
        order = self._by_turn[job.turn]
        order.remove(one)
        if not order:
            del self._by_turn[job.turn]
            place = self._turns.index(job.turn)
            del self._turns[place], self._orders[place]
        return job

    def reorder(self, predicted: Iterable[tuple[SampleKey, float]]) -> None:
        """Change jobs' predicted lengths. Their declared lengths are asked for anew."""
        self.add_all([(length, key, self.remove(key)) for key, length in predicted])

    def declare(self, tell: Teller | None) -> None:
        """Have jobs' declared lengths given by this function from now on; None: nobody asks for these."""
        if tell is None and self._tell is None:
            return
        self._tell = tell
        for order in self._orders:
            order.declare(tell)

    def by_turn(self) -> Sequence[LengthOrder]:
        """Return the jobs by turn, the first turn first; within a turn the shortest job comes first."""
        return self._orders

    def longest(self) -> SampleKey | None:
        """Return the longest job of the first turn; None if no job waits."""
        return self._orders[0].longest()[0][1] if self._orders else None


@dataclass(eq=False)
class Board:
    """The dispatcher's state: waiting jobs, generators, and which generator has which job."""

    waiting: Waiting = field(default_factory=Waiting)
    generators: dict[str, BoardGenerator] = field(default_factory=dict)
    home: dict[SampleKey, str] = field(default_factory=dict)  # the generator that has a job
    now: float = float("-inf")  # the time of the newest event
    _fastest_first: list[BoardGenerator] = field(default_factory=list)
    # a heap: next step, name, stamp. A step may have become longer since: that is noticed at the top
    _free: list[tuple[float, str, int]] = field(default_factory=list)
    _stamps: dict[str, int] = field(default_factory=dict)  # of the entry in `_free` that holds
    _stamp: int = 0
    _overfull: set[str] = field(default_factory=set)
    _changed: set[str] = field(default_factory=set)  # generators to look at before these two are used

    def start(self, generator: BoardGenerator, job: SampleJob, tokens: float = 0.0) -> None:
        """Give a job to a generator; `tokens`: how many it has already."""
        generator.advance(self.now)
        generator.start(job, tokens)
        self.home[job.key] = generator.name
        if generator.free <= 0:
            self._changed.add(generator.name)

    def end(self, key: SampleKey) -> tuple[BoardGenerator, SampleJob] | None:
        """Take a job from its generator, and return both; None if no generator has it."""
        if (name := self.home.pop(key, None)) is None:
            return None
        generator = self.generators[name]
        generator.advance(self.now)
        job = generator.end(key)
        assert job is not None
        self._changed.add(name)
        return generator, job

    def changed(self, name: str) -> None:
        """Note that a generator has another curve, or may be given more or less than before."""
        self._changed.add(name)

    def tokens(self, keys: Iterable[SampleKey]) -> list[float]:
        """Return how many tokens each of the jobs has by now; -1 for those that no generator has."""
        found, home, generators, now = [], self.home, self.generators, self.now
        for key in keys:
            if (name := home.get(key)) is None:
                found.append(-1.0)
                continue
            generator = generators[name]
            if generator.now < now:
                generator.advance(now)
            found.append(generator.tokens(key))
        return found

    def emptiest(self) -> BoardGenerator | None:
        """Return the generator with a free slot with the fastest next step; None if none is free."""
        if self._changed:
            self._settle()
        while self._free:
            then_s, name, stamp = self._free[0]
            if self._stamps.get(name) != stamp:
                heapq.heappop(self._free)
                continue
            generator = self.generators[name]
            if (step_s := generator.next_step_s) == then_s:
                return generator
            heapq.heapreplace(self._free, (step_s, name, stamp))
        return None

    def overfull(self) -> list[BoardGenerator]:
        """Return the generators that have more jobs than they may be given."""
        self._settle()
        return [self.generators[name] for name in sorted(self._overfull)]

    def _settle(self) -> None:
        for name in self._changed:
            self._stamps.pop(name, None)
            generator = self.generators.get(name)
            free = 0 if generator is None else generator.free
            if generator is not None and free > 0:
                self._enter(generator)
            if free < 0:
                self._overfull.add(name)
            else:
                self._overfull.discard(name)
        self._changed.clear()
        if len(self._free) > 64 + 4 * len(self.generators):  # most of them hold no more
            names = list(self._stamps)
            self._free.clear()
            for name in names:
                self._enter(self.generators[name])

    def _enter(self, generator: BoardGenerator) -> None:
        self._stamp += 1
        self._stamps[generator.name] = self._stamp
        heapq.heappush(self._free, (generator.next_step_s, generator.name, self._stamp))

    @property
    def fastest_first(self) -> Sequence[BoardGenerator]:
        """The generators, by the duration of their shortest step."""
        if not self._fastest_first:
            self._fastest_first = sorted(self.generators.values(), key=speed_order)
        return self._fastest_first

    def regrouped(self, name: str) -> None:
        """Note that a generator came, went, or has a new latency curve: the order by speed is another."""
        self._fastest_first = []
        if name in self.generators:
            self._changed.add(name)
            return
        self._stamps.pop(name, None)
        self._overfull.discard(name)
        self._changed.discard(name)


def speed_order(generator: BoardGenerator) -> tuple[float, str]:
    """Return the key by which the generators are in order of speed."""
    return float(generator.seconds[1]), generator.name
