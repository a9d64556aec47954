"""Divides machines between generators and trainer: any number of pools with prices, links and kinds.

pools ──► kinds (tensor parallel, devices) ──► splits ──► estimated steps ──► by the goal, the best first

All splits are estimated if there are not too many; otherwise the search goes from some splits to better ones,
one pool at a time. `flows.planning.two_stage_split` is the paper's algorithm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flows.planning.machine_pools import MachinePool, PlanError, check_pools
from flows.planning.step_estimate import (
    GeneratorKind,
    IterationDemand,
    MachineSplit,
    StepEstimator,
    TrainerKind,
)
from flows.planning.times_source import TimesSource

ALIKE = 0.005  # steps that differ by less than this share are equally good
_MOST_SPLITS = 12_000  # that are all estimated
_AMOUNTS = 40  # numbers of devices of a pool that are looked at, in the first round
_ROUNDS = 12
_MOST_STARTS = 12  # pools from whose trainers a search starts; of more, one of each kind of hardware
_MOST_COLUMNS = 80_000  # of a search: each split that it estimates has one for each pool that generates
_MOST_AT_ONCE = 20_000  # columns of splits that are compared in one move of a search
PoolChoice = tuple[GeneratorKind, int] | None  # of a pool: a kind of generators and how many; None: none


@dataclass(frozen=True)
class PlanGoal:
    """The goal of a plan."""

    least: Literal["time", "cost"] = "time"
    deadline_s: float | None = None  # that a step may take

    def __post_init__(self) -> None:
        """Raise PlanError for a deadline that nothing can meet."""
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise PlanError(
                f"a deadline is a number of seconds above 0 that a step may take; it is {self.deadline_s:g}"
            )


@dataclass(frozen=True)
class SplitEstimate:
    """A split with the time of its step and the price of its machines."""

    split: MachineSplit
    step_s: float

    @property
    def cost(self) -> float:
        """The price of a step. Where no machine has a price, its machine-hours."""
        return self.step_s / 3600 * (self.split.price or sum(self.split.machines().values()) * 1e-9)

    @property
    def devices(self) -> int:
        """How many devices it uses."""
        counts = sum(count * kind.tensor_parallel for kind, count in self.split.generators)
        return counts + (0 if self.split.takes_turns else self.split.trainer.devices)


def by_goal(found: Sequence[SplitEstimate], goal: PlanGoal) -> list[SplitEstimate]:
    """Return the splits that can work, the best first. Among equally good ones the cheaper, smaller is."""
    able = [one for one in found if math.isfinite(one.step_s)]
    if goal.deadline_s is not None:
        able = [one for one in able if one.step_s <= goal.deadline_s]
    if not able:
        return []
    key = (lambda one: one.step_s) if goal.least == "time" else (lambda one: one.cost)
    limit = min(key(one) for one in able) * (1 + ALIKE)
    best = sorted(
        (one for one in able if key(one) <= limit),
        key=(lambda one: (one.cost, one.devices, one.step_s))
        if goal.least == "time"
        else (lambda one: (one.step_s, one.devices)),
    )
    rest = sorted((one for one in able if key(one) > limit), key=key)
    return best + rest


def kind_in_turns(kind: GeneratorKind, times: TimesSource) -> GeneratorKind | None:
    """Return a kind with the slots and the memory that it has in turns with the trainer; None: no slots."""
    hardware, many = kind.pool.hardware, kind.tensor_parallel
    slots = min(kind.slots, times.slots_in_turns(hardware, many))
    if not slots:
        return None
    engine = kind.engine if slots == kind.slots else times.engine(hardware, many, slots)
    room = times.room_in_turns(hardware, many)
    return GeneratorKind(kind.pool, replace(engine, room=room), many)


class MachineAllocator:
    """Finds the best splits of some pools."""

    def __init__(
        self, pools: Sequence[MachinePool], times: TimesSource, demand: IterationDemand, *,
        may_take_turns: bool = True,
    ) -> None:  # fmt: skip
        """Raises PlanError for hardware that nothing is known of, and if the model fits nowhere."""
        check_pools(pools, times.known)
        self._pools, self._times, self.demand = tuple(pools), times, demand
        self._turns = may_take_turns
        self._kinds = [kind for pool in pools if pool.generates for kind in self._kinds_of(pool)]
        self._trainers = [one for pool in pools if pool.trains for one in self._trainers_of(pool)]
        self._check_memory()
        no_turns = {  # by trainers on one machine: engines that join from others draw all the time
            id(one): times.turn_problem(one.pool.hardware, one.devices)
            for one in self._trainers
            if may_take_turns and one.devices <= one.pool.devices
        }
        self._turning = {one for one, problem in no_turns.items() if not problem}
        self._no_turns = next((problem for problem in reversed(no_turns.values()) if problem), "")
        self._in_turns = self._kinds_in_turns()
        self._estimator = StepEstimator(demand, [*self._kinds, *self._in_turns.values()])
        self._seen: dict[tuple[object, ...], SplitEstimate] = {}
        self._columns = 0  # of all splits that were estimated
        self._options: dict[tuple[str, bool], list[PoolChoice]] = {}
        self._short = ""  # of main memory, the first such split that was left out

    def estimates(self, goal: PlanGoal) -> list[SplitEstimate]:
        """Return estimated splits, the best first. Raises PlanError if none meets the goal."""
        if self._space(full=True) <= _MOST_SPLITS:
            self._estimate(
                split
                for trainer in self._trainers
                for choices in itertools.product(*(self._choices(pool, full=True) for pool in self._pools))
                for split in self._splits(trainer, choices)
            )
        else:
            self._search(goal)
        found = by_goal(list(self._seen.values()), goal)
        if not found:
            raise PlanError(self._why_none(goal))
        return found

    def estimate(self, split: MachineSplit) -> SplitEstimate:
        """Return the estimate of one split of this allocator's kinds."""
        return SplitEstimate(split, float(self._estimator.step_s([split])[0]))

    def _why_none(self, goal: PlanGoal) -> str:
        quickest = by_goal(list(self._seen.values()), PlanGoal("time"))
        if not quickest and self._short:
            return f"{self._short}. No other split of these machines can work"
        if not quickest:
            return (
                "no split of these machines can work: a pool has too few devices for both sides. Give "
                "placement.machines more devices, or more machines"
            ) + "".join(f". And {why}" for why in (self._no_turns, self._no_fewer()) if why)
        return (
            f"no split of these machines takes at most {goal.deadline_s:g} s for a step: the quickest takes "
            f"{quickest[0].step_s:.3g} s. Give a longer deadline, or placement.machines more machines"
        )

    def _no_fewer(self) -> str:
        """Return why a trainer can't have fewer devices than those that were tried; empty: it can."""
        for pool in self._pools:
            most = min((one.devices for one in self._trainers if one.pool is pool), default=1)
            fewer = [one for one in _amounts(pool.total, pool.grain, 3 * _AMOUNTS) if one < most]
            if fewer and (why := self._times.trainer_problem(pool.hardware, max(fewer))):
                return f"with fewer devices {why}"
        return ""

    def _kinds_of(self, pool: MachinePool) -> Iterator[GeneratorKind]:
        for devices in self._times.tensor_parallel(pool.hardware, pool.devices):
            if slots := self._times.most_slots(pool.hardware, devices):
                yield GeneratorKind(pool, self._times.engine(pool.hardware, devices, slots), devices)

    def _trainers_of(self, pool: MachinePool) -> Iterator[TrainerKind]:
        for devices in _amounts(pool.total, pool.grain, 3 * _AMOUNTS):
            learner = self._times.learner(pool.hardware, devices)
            if learner is not None:
                yield TrainerKind(pool, learner, devices)

    def _kinds_in_turns(self) -> dict[int, GeneratorKind]:
        """Return by the id of each kind how it generates in turns, with the learner's state beside it."""
        found = {}
        turning = {one.pool.name for one in self._trainers if id(one) in self._turning}
        for kind in self._kinds:
            if kind.pool.name in turning and (changed := kind_in_turns(kind, self._times)):
                found[id(kind)] = changed
        return found

    def _check_memory(self) -> None:
        for word, found, verb in (
            ("generate", self._kinds, "generates"),
            ("train", self._trainers, "trains"),
        ):
            pools = [pool for pool in self._pools if getattr(pool, f"{word}s")]
            if not pools:
                raise PlanError(
                    f"placement.machines: none of them may {word}: add {word} to the `use` of one of them"
                )
            if not found:
                names = ", ".join(
                    f"{pool.name} ({pool.machines} × {pool.devices} {pool.hardware})" for pool in pools
                )
                most = max(pools, key=lambda pool: pool.total)
                why = self._times.trainer_problem(most.hardware, most.total) if verb == "trains" else ""
                raise PlanError(
                    f"placement.machines: the memory of all that {verb}, {names}, can't hold the model"
                    f"{f': {why}' if why else ''}. Or give it machines with more devices or more memory"
                )

    def _choices(self, pool: MachinePool, *, full: bool) -> list[PoolChoice]:
        """Return all that a pool may do on the generating side."""
        if (known := self._options.get((pool.name, full))) is not None:
            return known
        found: list[PoolChoice] = [None]
        for kind in self._kinds:
            if kind.pool is pool:
                amounts = _amounts(pool.total, pool.grain, 0 if full else _AMOUNTS)
                counts = {pool.most_generators(devices, kind.tensor_parallel) for devices in amounts} - {0}
                found += [(kind, count) for count in sorted(counts)]
        self._options[pool.name, full] = found
        return found

    def _space(self, *, full: bool) -> int:
        return math.prod(
            [len(self._trainers), *(len(self._choices(pool, full=full)) for pool in self._pools)]
        )

    def _splits(self, trainer: TrainerKind, choices: Sequence[PoolChoice]) -> Iterator[MachineSplit]:
        """Yield the split that these choices make, if the pools have the devices; and the one in turns."""
        chosen = tuple(one for one in choices if one is not None)
        if not chosen:
            return
        own = next(((kind, count) for kind, count in chosen if kind.pool is trainer.pool), None)
        used = own[0].tensor_parallel * own[1] if own else 0
        left = trainer.pool.total - trainer.devices
        beside = not own or own[1] <= trainer.pool.most_generators(left, own[0].tensor_parallel)
        found = []
        if trainer.pool.shares_cores or beside:
            found.append(MachineSplit(trainer, chosen, self.demand.lookahead))
        if own and len(chosen) == 1 and used == trainer.devices and id(trainer) in self._turning:
            turning = self._in_turns.get(id(own[0]))
            if turning is not None:
                lookahead = self.demand.lookahead
                found.append(MachineSplit(trainer, ((turning, own[1]),), lookahead, takes_turns=True))
        for split in found:
            if problem := split.memory_problem():
                self._short = self._short or problem
            else:
                yield split

    def _estimate(self, splits: Iterator[MachineSplit]) -> list[SplitEstimate]:
        """Return the estimates of splits, and keep them."""
        named = {_key(split): split for split in splits}
        new = {key: split for key, split in named.items() if key not in self._seen}
        steps = self._estimator.step_s(list(new.values()))
        self._columns += sum(len(split.generators) for split in new.values())
        for (key, split), step_s in zip(new.items(), steps.tolist(), strict=True):
            self._seen[key] = SplitEstimate(split, step_s)
        return [self._seen[key] for key in named]

    def _search(self, goal: PlanGoal) -> None:
        """Go from some splits to better ones, one pool at a time, until no pool has a better choice."""
        none: list[PoolChoice] = [None for _ in self._pools]
        if self._turns:
            alone = (
                [*none[:place], one, *none[place + 1 :]]
                for place, pool in enumerate(self._pools)
                for one in self._choices(pool, full=False)
            )
            self._estimate(
                split
                for choices in alone
                for trainer in self._trainers
                for split in self._splits(trainer, choices)
                if split.takes_turns
            )
        most = [self._choices(pool, full=False)[-1] for pool in self._pools]
        starts = self._starts()
        # The quickest split uses nearly everything, and the cheapest one little: among many pools the way
        # from the other end would take all that may be looked at.
        ends = (True, False) if goal.least == "time" else (False, True)
        for everything, part in itertools.product(ends, (0, 3, 1)):
            for kinds in starts:
                trainer = kinds[len(kinds) * part // 4]
                others = [one if one and one[0].pool is not trainer.pool else None for one in most]
                self._climb(trainer, others if everything else none, goal)

    def _starts(self) -> list[list[TrainerKind]]:
        """Return the trainers of each pool; of many pools, of the largest one of each kind of hardware.

        A search also goes from one pool's trainers to those of others, so it need not start from all.
        """
        by_pool: dict[str, list[TrainerKind]] = {}
        for one in self._trainers:
            by_pool.setdefault(one.pool.name, []).append(one)
        if len(by_pool) <= _MOST_STARTS:
            return list(by_pool.values())
        largest: dict[str, list[TrainerKind]] = {}
        for kinds in sorted(by_pool.values(), key=lambda one: -one[0].pool.total):
            largest.setdefault(kinds[0].pool.hardware.upper(), kinds)
        return list(largest.values())

    @property
    def _spent(self) -> bool:
        return self._columns >= _MOST_COLUMNS

    def _climb(self, trainer: TrainerKind, choices: list[PoolChoice], goal: PlanGoal) -> None:
        best: SplitEstimate | None = None
        for number in range(_ROUNDS):
            before = best
            for place, pool in enumerate(self._pools):
                if self._spent:
                    return
                options = self._choices(pool, full=number > 0)
                best = self._better(best, self._apart(trainer, choices, place, options), goal)
                if best is not None:
                    trainer, choices = best.split.trainer, self._choices_of(best.split)
            if best is None:
                return  # no pool can do anything beside this trainer
            best = self._better(best, self._other_trainers(choices), goal)
            assert best is not None
            if best is before:
                best = self._better(best, self._swaps(best.split), goal)
            assert best is not None
            trainer, choices = best.split.trainer, self._choices_of(best.split)
            if best is before:
                return

    def _apart(
        self, trainer: TrainerKind, choices: list[PoolChoice], place: int, options: Sequence[PoolChoice]
    ) -> Iterator[MachineSplit]:
        """Yield the splits in which one pool does something else, and nothing takes turns."""
        for option in options:
            for split in self._splits(trainer, [*choices[:place], option, *choices[place + 1 :]]):
                if not split.takes_turns:
                    yield split

    def _swaps(self, split: MachineSplit) -> Iterator[MachineSplit]:
        """Yield the splits in which one pool does the work of another."""
        choices = self._choices_of(split)
        for gone, place in itertools.permutations(range(len(self._pools)), 2):
            if choices[gone] is not None:
                fewer = [*choices[:gone], None, *choices[gone + 1 :]]
                options = self._choices(self._pools[place], full=False)
                yield from self._apart(split.trainer, fewer, place, options)

    def _other_trainers(self, choices: list[PoolChoice]) -> Iterator[MachineSplit]:
        """Yield the splits with other trainers. Their own pool does as before, or all it can, or nothing."""
        for trainer in self._trainers:
            place, left = self._pools.index(trainer.pool), trainer.pool.total - trainer.devices
            most: list[PoolChoice] = [
                (kind, count)
                for kind in self._kinds
                if kind.pool is trainer.pool
                if (count := kind.pool.most_generators(left, kind.tensor_parallel))
            ]
            yield from self._apart(trainer, choices, place, [choices[place], None, *most])

    def _better(
        self, best: SplitEstimate | None, splits: Iterator[MachineSplit], goal: PlanGoal
    ) -> SplitEstimate | None:
        """Return the best of some splits and the best so far; if none meets the deadline, the quickest."""
        found = self._estimate(_as_many(splits, _MOST_AT_ONCE)) + ([best] if best else [])
        ordered = by_goal(found, goal) or by_goal(found, PlanGoal("time"))
        return ordered[0] if ordered else best

    def _choices_of(self, split: MachineSplit) -> list[PoolChoice]:
        chosen = {kind.pool.name: (kind, count) for kind, count in split.generators}
        return [chosen.get(pool.name) for pool in self._pools]


def _as_many(splits: Iterator[MachineSplit], columns: int) -> Iterator[MachineSplit]:
    """Yield splits until they have so many columns together."""
    for split in splits:
        yield split
        columns -= len(split.generators)
        if columns <= 0:
            return


def _key(split: MachineSplit) -> tuple[object, ...]:
    generators = tuple((id(kind), count) for kind, count in split.generators)
    return id(split.trainer), generators, split.lookahead, split.takes_turns


def _amounts(total: int, grain: int, most: int) -> list[int]:
    """Return numbers of devices, in steps of `grain`: all, or about `most` with ever longer steps."""
    units = total // grain
    if not most or units <= most:
        return [grain * many for many in range(1, units + 1)]
    found = {round(units ** (part / (most - 1))) for part in range(most)} | {units}
    return [grain * many for many in sorted(found)]
