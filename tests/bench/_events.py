"""An iteration in virtual time that costs little: generators that only know when their samples end.

    dispatcher ── jobs ──► generators: heaps of ends ──► samples ──► dispatcher

The real dispatcher and its policy; in place of generators and engines, a heap for each. What the dispatcher
does takes as long as it took of this machine's CPU: what it decides is there only then, and what ends
meanwhile waits until it has time, as in a run.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flows.simulation.virtual_chooser import VirtualChooser, as_measured, choose_virtually
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import Policy
from schemas.identity import SampleKey


class _Generator:
    """Runs as many of its jobs as it has slots, in order of work, a step after the other."""

    def __init__(self, table: np.ndarray) -> None:
        self._seconds = table.tolist()
        self._slots = len(table) - 1
        self._ends: list[tuple[float, SampleKey]] = []  # a heap, by the step at which they end
        self._queue: list[tuple[object, SampleKey, int]] = []  # a heap of jobs that wait for a slot here
        self._done: list[SampleKey] = []
        self._steps = self._now = 0.0

    def due(self) -> float:
        """When its next sample ends, or has ended."""
        if self._done:
            return self._now
        if not self._ends:
            return float("inf")
        return self._now + (self._ends[0][0] - self._steps) * float(self._seconds[len(self._ends)])

    def give(self, jobs: Sequence[SampleJob], lengths: Mapping[SampleKey, int], now: float) -> None:
        self._run(now)
        for job in jobs:
            heapq.heappush(self._queue, (job.order_key, job.key, lengths[job.key]))
        self._fill()

    def take(self, now: float) -> list[SampleKey]:
        """Return the samples that have ended since the last call."""
        self._run(now)
        done, self._done = self._done, []
        return done

    def give_back(self, keys: Sequence[SampleKey]) -> list[SampleKey]:
        """Return those of the jobs that are not begun, and drop them."""
        back = {key for _, key, _ in self._queue} & set(keys)
        self._queue = [one for one in self._queue if one[1] not in back]
        heapq.heapify(self._queue)
        return sorted(back)

    def _run(self, now: float) -> None:
        while self._ends:
            step_s = self._seconds[len(self._ends)]
            end = self._now + (self._ends[0][0] - self._steps) * step_s
            if end > now:
                self._steps += (now - self._now) / step_s
                break
            self._steps, self._now = max(self._steps, self._ends[0][0]), max(self._now, end)
            while self._ends and self._ends[0][0] <= self._steps + 1e-6:
                self._done.append(heapq.heappop(self._ends)[1])
            self._fill()
        self._now = max(self._now, now)

    def _fill(self) -> None:
        while self._queue and len(self._ends) < self._slots:
            _, key, length = heapq.heappop(self._queue)
            heapq.heappush(self._ends, (self._steps + length, key))


@dataclass
class Iteration:
    """What one iteration took. Seconds of CPU, but for those that say otherwise."""

    makespan_s: float = 0.0  # of virtual time
    admit_s: float = 0.0
    first_deal_s: float = 0.0  # until the first jobs are dealt, with their admission
    dealt_s: float = 0.0  # of virtual time, until the last job is dealt that begins before any sample ends
    dispatch_s: float = 0.0  # all that the dispatcher did, without choices
    choices_s: list[float] = field(default_factory=list)
    longest_turn_s: float = 0.0


class _Charged:
    """Counts the CPU seconds of the dispatcher, without those of choices."""

    def __init__(self, chooser: VirtualChooser) -> None:
        self._chooser = chooser
        self.last_s = self.all_s = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time() - self._chooser.spent_s

    def __exit__(self, *error: object) -> None:
        self.last_s = time.thread_time() - self._chooser.spent_s - self._began
        self.all_s += self.last_s


class _World:
    """The dispatcher and its generators, at one moment."""

    def __init__(
        self, dispatcher: Dispatcher, tables: Sequence[np.ndarray], lengths: Mapping[SampleKey, int]
    ) -> None:
        self.dispatcher, self._lengths = dispatcher, lengths
        self._generators = {f"g{number:04d}": _Generator(table) for number, table in enumerate(tables)}
        for name, table in zip(self._generators, tables, strict=True):
            dispatcher.join(name, len(table) - 1, table, 0.0)
        self._due: list[tuple[float, str]] = []  # when generators' next samples end; some are out of date

    @property
    def next_at(self) -> float:
        """When the next sample ends."""
        while self._due and self._generators[self._due[0][1]].due() != self._due[0][0]:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else float("inf")

    def ended(self, now: float) -> list[SampleKey]:
        """Return the samples that have ended."""
        found: list[SampleKey] = []
        while self.next_at <= now:
            name = heapq.heappop(self._due)[1]
            found += self._generators[name].take(now)
            heapq.heappush(self._due, (self._generators[name].due(), name))
        return found

    def turn(
        self, ended: Sequence[SampleKey], now: float
    ) -> tuple[dict[str, list[SampleJob]], dict[str, list[SampleKey]]]:
        """Have the dispatcher take its turn. Return what it gives, and what it asks back."""
        for key in ended:
            self.dispatcher.finished(key, self._lengths[key], now)
        return self.dispatcher.turn(now), self.dispatcher.withdraw()

    def carry_out(
        self, given: Mapping[str, Sequence[SampleJob]], back: Mapping[str, Sequence[SampleKey]], now: float
    ) -> dict[str, list[SampleKey]]:
        """Let the generators hear of it. Return what they give back."""
        for name, jobs in given.items():
            self._generators[name].give(jobs, self._lengths, now)
            heapq.heappush(self._due, (self._generators[name].due(), name))
        return {name: self._generators[name].give_back(keys) for name, keys in back.items()}


def iterate(
    jobs: Sequence[SampleJob], lengths: Mapping[SampleKey, int], tables: Sequence[np.ndarray], policy: Policy,
    *, latency_s: float, midway: Callable[[Dispatcher], None] | None = None,
) -> Iteration:  # fmt: skip
    """Make all samples; they are admitted at the start. `midway` is called when a quarter of them is done."""
    found, chooser = Iteration(), choose_virtually(policy, as_measured)
    world = _World(Dispatcher(policy, latency_s=latency_s), tables, lengths)
    dispatcher, charged = world.dispatcher, _Charged(chooser)
    with charged:
        dispatcher.admit(jobs, 0.0)
    found.admit_s = now = charged.last_s
    left = len(jobs)
    while left:
        ended = world.ended(now)
        with charged:
            given, back = world.turn(ended, now)
        found.longest_turn_s = max(found.longest_turn_s, charged.last_s)
        if given and not found.first_deal_s:
            found.first_deal_s = charged.all_s
        left -= len(ended)
        now += charged.last_s
        returned = world.carry_out(given, back, now)
        with charged:
            for name, keys in returned.items():
                dispatcher.returned(name, keys, now)
        if given and left == len(jobs):
            found.dealt_s = now
        if midway is not None and left <= 0.75 * len(jobs):
            midway(dispatcher)
            midway = None
        if left:
            now = max(now, min(dispatcher.wakes_at, world.next_at))
    found.makespan_s = now
    with charged:
        dispatcher.forget({job.prompt.group for job in jobs})
    found.dispatch_s, found.choices_s = charged.all_s, chooser.each_s
    return found
