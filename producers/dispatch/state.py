"""The board as arrays, for the compiled simulation of plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from producers.dispatch.beliefs import Beliefs, Kin
from producers.dispatch.board import NO_DEADLINE, Board, BoardGenerator, speed_order
from producers.dispatch.drift import Drift
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.length_order import LengthOrder
from schemas.identity import SampleKey

Setting = tuple[float, float]  # quantile, seconds from now to the deadline
LONGEST_FIRST: Setting = 0.5, NO_DEADLINE
MIXED: Setting = 0.0, NO_DEADLINE  # waiting jobs in mixed order: for a ranker that says little

_HEAP = 50  # in a plan's run, a sample costs as much as a look at so many generators
_MOST_WORK = 200_000.0  # of a run: a choice takes about half a second then
_FEWEST = 4  # generators that may stand for all


@cache
def compiled() -> Any:
    """Import the compiled module when first needed: numba takes a second, and small runs never need it."""
    from producers.dispatch import makespan

    return makespan


@dataclass
class SampleTable:
    """Waiting and running samples, one row each."""

    beliefs: np.ndarray
    predicted: np.ndarray
    kin: Kin | None
    keys: Sequence[SampleKey]
    names: Sequence[str]  # of generators
    order: np.ndarray
    where: np.ndarray
    tokens: np.ndarray
    tables: np.ndarray
    slots: np.ndarray
    stalls: np.ndarray
    prefill_s: np.ndarray  # seconds to prefill a token, by generator
    prompts: np.ndarray  # tokens of each sample's prompt
    learned: Beliefs
    drift: Drift
    parts: float = 1.0  # there are so many tables like this one: the makespan is that of the last

    def expected(self, draws: np.ndarray, setting: Setting, critical: np.ndarray | None = None) -> float:
        """Return the mean makespan in seconds. `critical[i]` is raised each time that sample i ends last."""
        counts = np.zeros(len(self.where), np.int64) if critical is None else critical
        order = np.random.default_rng(0).permutation(self.order) if setting == MIXED else self.order
        ends = compiled().makespans(
            draws, self.beliefs, order, self.where, self.tokens, self.tables, self.slots, self.stalls,
            *setting, counts,
        )  # fmt: skip
        return mean_of_last(ends, self.parts)

    def batch(self) -> np.ndarray:
        """Return how many samples run on each generator."""
        return np.bincount(self.where[self.where >= 0], minlength=len(self.slots))

    def move(self, row: int, target: int) -> None:
        """Move a running sample to another generator, which stands still while it prefills."""
        self.where[row] = target
        self.stalls[target] += self.prefill_s[target] * (self.prompts[row] + self.tokens[row])


@dataclass
class ChosenJobs:
    """Generators and jobs by which plans are judged.

    `jobs`: each with the place of its generator (-1: it waits) and its tokens. `each`: so many slots, and
    jobs, a row stands for. `scale`: so many jobs there are for each that was chosen.
    """

    generators: Sequence[BoardGenerator]
    jobs: Sequence[tuple[SampleJob, int, float]]
    each: int
    scale: float
    are_all: bool

    @property
    def work(self) -> float:
        """The cost of one run of a plan, in looks at a generator."""
        return len(self.jobs) * (_HEAP + len(self.generators))


def chosen_jobs(board: Board, now: float) -> ChosenJobs:
    """Choose by what to judge plans: by all of a small board, and by a part of a large one.

    A plan is a quantile and a deadline, and these are the same for a thousand generators as for a dozen of
    their kinds with a dozen's share of the jobs. So some generators stand for all, evenly spaced in the order
    of slots, speed and load, with all that they run; and some of the waiting jobs, evenly spaced in the order
    of length, down from the longest. If even a few generators have too many jobs, a row stands for several
    slots.
    """
    count, every = len(board.waiting) + len(board.home), board.fastest_first
    chosen, each, are_all = every, 1, True
    if count * (_HEAP + len(every)) > _MOST_WORK:
        are_all = False
        number = _generators_for(count / len(every), len(every))
        each = math.ceil(count / len(every) * number * (_HEAP + number) / _MOST_WORK)
        chosen = _evenly(every, number)
    running: list[tuple[SampleJob, int, float]] = []
    for place, generator in enumerate(chosen):
        generator.advance(now)
        ordered = list(generator.running.items())
        slots = generator.slots - generator.slots % each or each
        if len(ordered) > slots:
            ordered.sort(key=lambda item: item[1].order_key)
        running += [(job, place, generator.tokens(key)) for key, job in ordered[:slots:each]]
        # jobs beyond its slots wait at the generator: for the plan, as if they waited here
        running += [(job, -1, 0.0) for _, job in ordered[slots::each]]
    if are_all:
        waiting = [job for job, _ in board.waiting]
    else:
        waiting = _from_the_longest(board, len(every) / len(chosen) * each)
    jobs = [(job, -1, 0.0) for job in waiting] + running
    return ChosenJobs(chosen, jobs, each, count / max(len(jobs), 1), are_all)


def _generators_for(jobs: float, most: int) -> int:
    """Return how many generators may stand for all, if each has so many jobs."""
    few = range(min(_FEWEST, most), most + 1)
    return max((n for n in few if jobs * n * (_HEAP + n) <= _MOST_WORK), default=few[0])


def _evenly(generators: Sequence[BoardGenerator], number: int) -> list[BoardGenerator]:
    """Return some generators, by slots, speed and load like all of them, the fastest first."""
    alike = sorted(
        generators, key=lambda i: (i.slots, round(10 * math.log(i.seconds[-1])), len(i.running), i.name)
    )
    places = ((2 * k + 1) * len(alike) // (2 * number) for k in range(number))
    return sorted((alike[place] for place in places), key=speed_order)


def _from_the_longest(board: Board, step: float) -> list[SampleJob]:
    """Return waiting jobs, evenly spaced, and the longest for sure: it may be the last to end."""
    turns = board.waiting.by_turn()
    if len(turns) == 1:
        order = turns[0]
    else:
        order = LengthOrder()
        order.add(list(chain(*turns)))
    return [job for _, _, job in order.from_the_longest(step)]


def mean_of_last(ends: np.ndarray, parts: float) -> float:
    """Return the mean of the greatest of so many independent values, each drawn from `ends`."""
    below = np.linspace(0.0, 1.0, len(ends) + 1) ** parts
    return float(np.sort(ends) @ np.diff(below))


def state_of(board: Board, group_beliefs: GroupBeliefs, now: float) -> SampleTable:
    """Return the table of the present board."""
    return table_of(chosen_jobs(board, now), group_beliefs)


def table_of(chosen: ChosenJobs, group_beliefs: GroupBeliefs) -> SampleTable:
    """Return the table of some jobs: a copy of all that a plan is judged by."""
    generators, jobs = chosen.generators, chosen.jobs
    slots = [max(1, generator.slots // chosen.each) for generator in generators]
    tables = np.full((len(generators), max(slots) + 1), NO_DEADLINE)
    for place, generator in enumerate(generators):
        batches = np.minimum(np.arange(slots[place] + 1) * chosen.each, generator.slots)
        tables[place, : slots[place] + 1] = generator.seconds[batches]
    keys = [job.key for job, _, _ in jobs]
    predicted = np.array([job.prompt.predicted for job, _, _ in jobs])
    beliefs, factors, kin = group_beliefs.rows_of([job for job, _, _ in jobs])
    return SampleTable(
        beliefs=beliefs, predicted=predicted, kin=kin, keys=keys,
        names=[generator.name for generator in generators],
        order=np.argsort(predicted * factors, kind="stable"),
        where=np.array([where for _, where, _ in jobs]),
        tokens=np.array([tokens for _, _, tokens in jobs]), tables=tables,
        slots=np.array(slots), stalls=np.zeros(len(generators)),
        prefill_s=np.array([generator.prefill_s for generator in generators]),
        prompts=np.array([len(job.prompt.tokens) for job, _, _ in jobs]),
        learned=group_beliefs.beliefs.frozen(), drift=group_beliefs.drift,
        parts=max(1.0, chosen.scale),
    )  # fmt: skip
