"""Plans a run: estimates all splits of the machines, simulates the best few, and says how sure it is.

all splits ──estimate──► the best few ──simulate──► one ──► fewer slots? less staleness? ──► figures
                                                     └──► again with other times and lengths ──► intervals
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flows.planning.allocating import ALIKE, MachineAllocator, PlanGoal, SplitEstimate
from flows.planning.machine_pools import PlanError
from flows.planning.step_estimate import GeneratorKind, MachineSplit
from flows.planning.times_source import TimesSource
from flows.plans.drawn_factors import FOUR, drawn_factors, speed_spread
from flows.plans.interval import Interval
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.simulated_split import (
    Scaled,
    SplitFigures,
    iterations_for,
    simulated_split,
    spec_of,
)
from flows.plans.slower_engines import SlowerEngines
from schemas.runspec import RunSpec

Say = Callable[[str, int, int], None]  # a text, how much is done, and of how much
_FIRST_SIMULATED, _THEN_SIMULATED = 3, 3  # splits: by the first estimates, and by corrected ones
_NEAR = 1.4  # times the best estimate: beyond it no simulation would make a split the best one
_PACKED_WELL = 0.02  # estimates that are wrong by less than this share are not corrected
_SAMPLES, _SAMPLES_TO_COMPARE = 4000, 1500  # of the steady iterations that are simulated
_BUDGET = 40_000  # samples that are simulated for intervals, about
_MOST_DRAWS = 12
_NINE_IN_TEN = 1.645  # deviations of a normal distribution
_LEAST_SLOTS, _HALVINGS = 4, 3
_WAITS = 0.03  # of its time: a trainer that waits more is not the slower side
_REFINED = 2  # splits, whose slots are looked at


@dataclass(frozen=True)
class PlannedSplit:
    """A split with its simulated figures."""

    split: MachineSplit
    estimate_s: float  # of a step, by formulas
    figures: SplitFigures


@dataclass(frozen=True)
class RunPlan:
    """How to divide the machines, and what comes of it."""

    inputs: PlanningInputs
    spec: RunSpec  # with the plan's staleness and slots
    goal: PlanGoal
    chosen: PlannedSplit
    others: tuple[PlannedSplit, ...]  # that were simulated, the best first
    why: str  # the runner-up lost; empty: there is none
    estimated: int  # splits
    simulated: int
    step_s: Interval
    samples_per_s: Interval
    cost_per_1000: Interval


def plan_run(
    inputs: PlanningInputs, goal: PlanGoal, *, seed: int = 0, may_take_turns: bool = True,
    say: Say = lambda text, done, total: None,
) -> RunPlan:  # fmt: skip
    """Return the best plan. Raises PlanError if nothing can work, or nothing meets the deadline."""
    if inputs.spec.placement.engine_ranks.elsewhere:
        raise PlanError(
            "placement.engine_ranks: engines over several machines are not planned. Set elsewhere: 0 for a "
            "plan of engines that fit on one machine each"
        )
    say("splits of the machines", 0, 1)
    # a server keeps its memory while it rests
    may_take_turns = may_take_turns and not inputs.spec.generator.computes_elsewhere
    allocator = MachineAllocator(inputs.pools, inputs.times, inputs.demand, may_take_turns=may_take_turns)
    estimates = allocator.estimates(goal)
    planner = _Planner(inputs, goal, seed, say)
    planned = planner.simulated(_different(estimates, _FIRST_SIMULATED))
    if (slower := planner.packing(planned)) > 1 + _PACKED_WELL:
        planned += planner.simulated(_corrected(inputs, goal, planned, slower, may_take_turns))
    planned += planner.simulated(_of_the_other_kind(estimates, planned, goal))
    planner.best(planned)  # raises PlanError if none meets the deadline
    refined = [planner.refined(one) for one in planner.ordered(planned)[:_REFINED]]
    refined = [planner.looked_at_longer(one) for one in refined]
    best = planner.fresher(planner.best(refined))
    different = {_machines(one.split): one for one in [*planned, *refined]}
    different.pop(_machines(best.split), None)
    others = planner.ordered(list(different.values()), any_time=True)
    step_s = interval_of(inputs, best.split, best.figures.step_s, seed=seed, say=say)
    figures = best.figures
    return RunPlan(
        inputs, spec_of(inputs.spec, best.split), goal, best, tuple(others),
        why_lost(others[0], best, goal) if others else "", len(estimates), len(planned), step_s,
        step_s.rate(figures.samples_per_s), step_s.scaled(figures.cost_per_1000),
    )  # fmt: skip


def _corrected(
    inputs: PlanningInputs, goal: PlanGoal, known: Sequence[PlannedSplit], slower: float, may_take_turns: bool
) -> list[SplitEstimate]:
    """Return more splits to simulate: the best ones if engines are as much slower as simulations say."""
    times = SlowerEngines(inputs.times, slower)
    allocator = MachineAllocator(inputs.pools, times, inputs.demand, may_take_turns=may_take_turns)
    try:
        found = allocator.estimates(goal)
    except PlanError:  # with these engines none meets the deadline
        return []
    taken = {_machines(one.split) for one in known}
    new = [one for one in found if _machines(one.split) not in taken]
    best = _different(new, _THEN_SIMULATED)
    return [replace(one, split=with_slots(one.split, inputs.times, 1.0)) for one in best]


def _of_the_other_kind(
    estimates: Sequence[SplitEstimate], known: Sequence[PlannedSplit], goal: PlanGoal
) -> list[SplitEstimate]:
    """Return the best split that takes turns if none of the known ones does, or that does not if all do.

    Formulas are wrong by other shares where sides overlap, so an estimate that is not far off is looked at.
    """
    kinds = {one.split.takes_turns for one in known}
    others = [one for one in estimates if one.split.takes_turns not in kinds]
    if len(kinds) != 1 or not others:
        return []
    best, other = ((one.step_s if goal.least == "time" else one.cost) for one in (estimates[0], others[0]))
    return others[:1] if other <= best * _NEAR else []


def with_slots(split: MachineSplit, times: TimesSource, factor: float) -> MachineSplit:
    """Return a split whose engines are those of `times`, with slots by a factor more or fewer."""
    generators = []
    for kind, count in split.generators:
        slots = max(1, math.ceil(kind.slots * factor))
        engine = times.engine(kind.pool.hardware, kind.tensor_parallel, slots)
        engine = replace(engine, room=kind.engine.room)  # in turns it is smaller than these times say
        generators.append((GeneratorKind(kind.pool, engine, kind.tensor_parallel), count))
    return replace(split, generators=tuple(generators))


class _Planner:
    """Simulates splits for one plan."""

    def __init__(self, inputs: PlanningInputs, goal: PlanGoal, seed: int, say: Say) -> None:
        self._spec, self._workload, self._times = inputs.spec, inputs.workload, inputs.times
        self._goal, self._seed, self._say = goal, seed, say

    def simulated(self, estimates: Sequence[SplitEstimate]) -> list[PlannedSplit]:
        """Simulate some splits."""
        found = []
        for number, one in enumerate(estimates):
            self._say("simulated splits", number, len(estimates))
            split = self._with_usable_slots(one.split)
            found.append(PlannedSplit(split, one.step_s, self._figures(split)))
        return found

    def packing(self, planned: Sequence[PlannedSplit]) -> float:
        """Return how many times longer generation takes than the bound says, by simulated splits.

        The bound packs samples without gaps. Splits whose trainer never waits say nothing about it.
        """
        ratios = [
            one.figures.step_s / one.estimate_s
            for one in planned
            if not one.split.takes_turns and one.figures.trainer.get("waiting for samples", 0.0) > _WAITS
        ]
        return sorted(ratios)[len(ratios) // 2] if ratios else 1.0

    def _figures(self, split: MachineSplit, samples: int = _SAMPLES_TO_COMPARE) -> SplitFigures:
        iterations = iterations_for(self._spec, split.lookahead, samples=samples)
        return simulated_split(self._spec, split, self._workload, iterations=iterations, seed=self._seed)

    def ordered(self, planned: Sequence[PlannedSplit], *, any_time: bool = False) -> list[PlannedSplit]:
        """Return splits by the goal, the best first. Without `any_time` all meet the deadline."""
        deadline_s = self._goal.deadline_s
        able = [one for one in planned if any_time or deadline_s is None or one.figures.step_s <= deadline_s]
        return sorted(able, key=lambda one: self._cost(one))

    def _cost(self, one: PlannedSplit) -> float:
        if self._goal.least == "time":
            return one.figures.step_s
        return SplitEstimate(one.split, one.figures.step_s).cost

    def best(self, planned: Sequence[PlannedSplit]) -> PlannedSplit:
        """Return the best of some splits; of those that are as good, the one with the fewest machines."""
        ordered = self.ordered(planned)
        if not ordered:
            quickest = min(one.figures.step_s for one in planned)
            raise PlanError(
                f"no split of these machines takes at most {self._goal.deadline_s:g} s for a step: of the "
                f"most promising ones, the quickest takes {quickest:.3g} s when it is simulated. Give a "
                "longer deadline, or placement.machines more machines"
            )
        alike = [one for one in ordered if self._cost(one) <= self._cost(ordered[0]) * (1 + 2 * ALIKE)]
        return min(alike, key=lambda one: (one.split.price, SplitEstimate(one.split, 0.0).devices))

    def refined(self, best: PlannedSplit) -> PlannedSplit:
        """Return a split of the same machines with as few slots as are as good."""
        for _ in range(_HALVINGS):
            if min(kind.slots for kind, _ in best.split.generators) < 2 * _LEAST_SLOTS:
                break
            fewer = with_slots(best.split, self._times, 0.5)
            self._say("fewer slots", 0, 1)
            tried = PlannedSplit(fewer, best.estimate_s, self._figures(fewer))
            if self._cost(tried) > self._cost(best):
                break
            best = tried
        return best

    def _with_usable_slots(self, split: MachineSplit) -> MachineSplit:
        """Return a split whose slots could all be in use at once, if so many samples are admitted."""
        algorithm = self._spec.algorithm
        admitted = algorithm.groups * algorithm.group_size * (1 + math.ceil(split.lookahead))
        many = sum(count for _, count in split.generators)
        usable = 2 ** math.ceil(math.log2(max(_LEAST_SLOTS, admitted / many)))
        most = max(kind.slots for kind, _ in split.generators)
        return with_slots(split, self._times, usable / most) if usable < most else split

    def looked_at_longer(self, best: PlannedSplit) -> PlannedSplit:
        """Return a split with figures of more iterations."""
        self._say("the best splits", 0, 1)
        return replace(best, figures=self._figures(best.split, _SAMPLES))

    def fresher(self, best: PlannedSplit) -> PlannedSplit:
        """Return the split with the least staleness that costs next to nothing."""
        if self._spec.algorithm.mode != "async" or best.split.takes_turns:
            return best
        limit = self._cost(best) * (1 + 2 * ALIKE)
        found, lower = best, math.ceil(best.split.lookahead) - 1
        while lower >= 0:
            self._say("less staleness", 0, 1)
            split = replace(best.split, lookahead=float(lower))
            tried = PlannedSplit(split, best.estimate_s, self._figures(split, _SAMPLES))
            if self._cost(tried) > limit:
                break
            found, lower = tried, lower - 1
        return found


def interval_of(
    inputs: PlanningInputs, split: MachineSplit, step_s: float, *, seed: int = 0, budget: int = _BUDGET,
    say: Say = lambda text, done, total: None,
) -> Interval:  # fmt: skip
    """Return the time of a split's step, `step_s`, and the range that holds it in nine cases of ten.

    Each draw has other times of engines, learner and links, other lengths on average, and another seed.
    Draws are compared with a simulation as short as they are, for a short one is a little quicker than a long
    one. `budget`: samples to simulate, about; there are at least four draws.
    """
    algorithm = inputs.spec.algorithm
    iterations = iterations_for(inputs.spec, split.lookahead, samples=_SAMPLES_TO_COMPARE)
    affordable = budget // (iterations * algorithm.groups * algorithm.group_size)
    draws = FOUR * max(1, min(_MOST_DRAWS, affordable) // FOUR)
    expected_s = _short_s(inputs, split, iterations, seed, Scaled())
    logs = []
    for number, scaled in enumerate(drawn_factors(inputs, split, draws)):
        say("simulated chances", number, draws)
        logs.append(math.log(_short_s(inputs, split, iterations, seed + 1 + number, scaled) / expected_s))
    return interval_around(step_s, logs, speed_spread(split))


def _short_s(
    inputs: PlanningInputs, split: MachineSplit, iterations: int, seed: int, scaled: Scaled
) -> float:
    found = simulated_split(
        inputs.spec, split, inputs.workload, iterations=iterations, seed=seed, scaled=scaled
    )
    return found.step_s


def interval_around(value: float, logs: Sequence[float], of_speed: float = 0.0) -> Interval:
    """Return a value with the range of nine in ten.

    `logs`: logarithms of the outcomes of `drawn_factors` over what is expected. `of_speed`: the relative
    standard deviation of the speed of all parts together, which these draws leave out.
    """
    middle = sum(logs) / len(logs)
    variance = sum((one - middle) ** 2 for one in logs) / len(logs)
    wide = _NINE_IN_TEN * math.hypot(math.sqrt(variance), of_speed)
    low, high = (math.exp(middle + sign * wide) * value for sign in (-1, 1))
    return Interval(value, min(low, value), max(high, value))


def _machines(split: MachineSplit) -> tuple[object, ...]:
    generators = sorted((kind.pool.name, kind.tensor_parallel, count) for kind, count in split.generators)
    return split.trainer.pool.name, split.trainer.devices, split.takes_turns, tuple(generators)


def _different(estimates: Sequence[SplitEstimate], most: int) -> list[SplitEstimate]:
    """Return the best few splits, at most two of which have as many devices on both sides."""
    found: list[SplitEstimate] = []
    taken: dict[tuple[object, ...], int] = {}
    for one in estimates:
        split = one.split
        devices = sorted((kind.pool.name, kind.tensor_parallel * count) for kind, count in split.generators)
        key = (split.trainer.pool.name, split.trainer.devices, split.takes_turns, tuple(devices))
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= 2:
            found.append(one)
        if len(found) == most:
            break
    return found


def waits_of(shares: dict[str, float]) -> dict[str, float]:
    """Return the shares of the causes that are no work: bubbles."""
    return {
        cause: share
        for cause, share in shares.items()
        if cause.startswith(("waiting", "away")) and share > 0.0005
    }


def why_lost(other: PlannedSplit, best: PlannedSplit, goal: PlanGoal) -> str:
    """Return why a split was not chosen."""
    ours, theirs = best.figures, other.figures
    longer = theirs.step_s / ours.step_s - 1
    cost = ours.cost_per_1000
    dearer = theirs.cost_per_1000 / cost - 1 if cost else 0.0
    late = goal.deadline_s is not None and theirs.step_s > goal.deadline_s
    if late:
        said = f"its step takes {theirs.step_s:.3g} s, and the deadline is {goal.deadline_s:g} s"
    elif goal.least == "cost" and cost:
        said = f"a sample costs {dearer:.1%} more" if dearer > 0 else "a sample costs as much"
        said += f", and its step takes {abs(longer):.1%} {'longer' if longer > 0 else 'less'}"
    elif longer > 2 * ALIKE:
        said = f"its step takes {longer:.1%} longer"
    else:
        said = "its step takes as long, and it uses more machines"
    return f"{said}; {_slower_side(other)}"


def _slower_side(one: PlannedSplit) -> str:
    generators = sum(waits_of(dict(one.figures.generators)).values())
    trainer = sum(waits_of(dict(one.figures.trainer)).values())
    if one.split.takes_turns:
        return "both sides take turns, so each waits for the other"
    if trainer > generators:
        return f"its generators are the slower side: the trainer waits {trainer:.0%} of the time"
    return f"its trainer is the slower side: generators wait {generators:.0%} of the time"
