"""Simulates a split of machines: the run's own code of scheduling, with the times of that split's parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from flows.planning.stage_times import EngineTimes, LearnerTimes, LinkTimes
from flows.planning.step_estimate import GeneratorKind, MachineSplit, StepEstimator
from flows.planning.workload import DrawnLengths, LengthSource, RecordedLengths, Workload
from flows.plans.planning_inputs import demand_of_lengths
from flows.plans.rented_machines import on_machines
from flows.plans.smaller_split import even_lengths, smaller_run
from flows.simulation.simulated_run import Outage, SimulatedRun, SimulatedSite
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import simulate
from schemas.runspec import RunSpec

_WARM = 1  # iterations at each end that are not steady, besides those that generation runs ahead
_MOST_STEADY = 12  # iterations
_LEAST_STEADY = {"async": 5, "sync": 2}  # where iterations overlap, two of them may be half as long or twice
MOST_SIMULATED = 3_000  # samples of one of the many simulations of a plan: of twice as many, a smaller run is


@dataclass(frozen=True)
class SplitFigures:
    """The outcome of a simulated split."""

    step_s: float
    samples_per_s: float
    cost_per_1000: float  # samples, in the currency of the prices
    staleness: float
    staleness_max: int
    generators: Mapping[str, float]  # share of all generators' time, by cause
    trainer: Mapping[str, float]
    bytes_per_step: Mapping[str, float]  # by pool, over its link
    link_busy: Mapping[str, float]  # by pool, the share of the time


@dataclass(frozen=True)
class Scaled:
    """Factors of a draw: how much longer than expected each part takes, and how much longer answers are."""

    engine: float = 1.0
    learner: float = 1.0
    link: float = 1.0
    lengths: float = 1.0


def simulated_run(
    spec: RunSpec, split: MachineSplit, workload: Workload | DrawnLengths, *, iterations: int, seed: int = 0,
    scaled: Scaled = Scaled(), failures: tuple[Outage, ...] = (), picture_of: int | None = None,
) -> SimulatedRun:  # fmt: skip
    """Return the run that a split makes of a run file."""
    if isinstance(workload, Workload):
        workload = longer(workload, scaled.lengths)
    shared = split.trainer.pool.shares_cores and not split.takes_turns
    run = SimulatedRun(
        spec=spec_of(spec, split),
        learner=slower_learner(split.trainer.learner, scaled.learner),
        sites=tuple(_site(kind, count, split, scaled) for kind, count in split.generators),
        workload=workload,
        cores=split.trainer.pool.work_cores if shared else None,
        colocated=split.takes_turns,
        iterations=iterations,
        seed=seed,
        failures=failures,
        picture_of=picture_of,
    )
    return on_machines(run, split)


def spec_of(spec: RunSpec, split: MachineSplit) -> RunSpec:
    """Return the run file with a split's staleness and slots."""
    algorithm = spec.algorithm
    if algorithm.mode == "async":
        algorithm = algorithm.model_copy(update={"staleness": split.lookahead})
    slots = max(kind.slots for kind, _ in split.generators)
    generator = spec.generator.model_copy(update={"slots": slots})
    return spec.model_copy(update={"algorithm": algorithm, "generator": generator})


def iterations_for(spec: RunSpec, lookahead: float, *, samples: int, most: int = _MOST_STEADY) -> int:
    """Return how many iterations are simulated: those at both ends, and some with about so many samples.

    `most`: iterations that are not at an end.
    """
    algorithm = spec.algorithm
    ends = 2 * (_WARM + math.ceil(lookahead)) + 1 if algorithm.mode == "async" else 0
    steady = round(samples / (algorithm.groups * algorithm.group_size))
    return min(algorithm.iterations, ends + max(_LEAST_STEADY.get(algorithm.mode, 2), min(most, steady)))


def split_figures(split: MachineSplit, found: Simulation, samples: int) -> SplitFigures:
    """Return the figures of a simulated split. `samples`: of an iteration."""
    mean, most = found.staleness()
    steps = len(found.steps)
    return SplitFigures(
        step_s=found.step_s,
        samples_per_s=found.samples_per_s,
        cost_per_1000=found.cost_per_1000,
        staleness=mean,
        staleness_max=most,
        generators=found.generator_shares(),
        trainer=found.learner_shares(),
        bytes_per_step={name: many / steps for name, many in found.link_bytes.items()},
        link_busy={name: busy_s / found.ended_at for name, busy_s in found.link_s.items()},
    )


def simulated_split(
    spec: RunSpec, split: MachineSplit, workload: Workload, *, iterations: int, seed: int = 0,
    scaled: Scaled = Scaled(), most_samples: int = MOST_SIMULATED,
) -> SplitFigures:  # fmt: skip
    """Simulate a split, and return its figures: those of a smaller run, if it has more samples than that."""
    samples = spec.algorithm.groups * spec.algorithm.group_size
    small = smaller_run(spec, split, iterations, most_samples)
    if small.factor == 1:
        run = simulated_run(spec, split, workload, iterations=iterations, seed=seed, scaled=scaled)
        return split_figures(split, simulate(run), samples)
    drawn = longer(workload, scaled.lengths).draw(spec, seed, iterations)
    few = even_lengths(drawn, spec.algorithm.groups, small.spec.algorithm.groups)
    run = simulated_run(
        small.spec, small.split, few, iterations=iterations, seed=seed, scaled=replace(scaled, lengths=1.0)
    )
    found = split_figures(split, simulate(run), samples)
    # formulas know the tail of all samples
    longer_by = _step_s(spec, split, drawn, iterations) / _step_s(small.spec, small.split, few, iterations)
    step_s = found.step_s * longer_by
    # each of its samples stands for several, and some of the machines were left out
    dearer = split.price / small.split.price if small.split.price else 1.0
    cost = found.cost_per_1000 * longer_by * dearer / small.factor
    return replace(found, step_s=step_s, samples_per_s=samples / step_s, cost_per_1000=cost)


def _step_s(spec: RunSpec, split: MachineSplit, drawn: DrawnLengths, iterations: int) -> float:
    """Return the time of a step by formulas."""
    demand = demand_of_lengths(spec, drawn, iterations)
    return float(StepEstimator(demand, [kind for kind, _ in split.generators]).step_s([split])[0])


@dataclass(frozen=True)
class _LongerLengths:
    """Lengths by a factor longer than others."""

    of: LengthSource
    factor: float

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        return np.asarray(self.of.quantiles(shares)) * self.factor


def longer(workload: Workload, factor: float) -> Workload:
    """Return a workload whose answers are longer by a factor."""
    if factor == 1:
        return workload
    answers = workload.answers
    if isinstance(answers, RecordedLengths):
        grown = tuple(tuple(max(1, round(one * factor)) for one in group) for group in answers.groups)
        return replace(workload, answers=replace(answers, groups=grown))
    return replace(workload, answers=_LongerLengths(answers, factor))


def _site(kind: GeneratorKind, count: int, split: MachineSplit, scaled: Scaled) -> SimulatedSite:
    engine, link = slower_engine(kind.engine, scaled.engine), slower_link(kind.pool.link, scaled.link)
    pool = kind.pool
    apart = pool.shares_cores and not pool.shares_cores_with(split.trainer.pool)
    return SimulatedSite(pool.name, (engine,) * count, link, cores=pool.work_cores if apart else None)


def slower_link(link: LinkTimes | None, factor: float) -> LinkTimes | None:
    """Return a link that takes longer by a factor."""
    if link is None:
        return None
    return replace(link, bytes_per_s=link.bytes_per_s / factor, latency_s=link.latency_s * factor)


def slower_engine(engine: EngineTimes, factor: float) -> EngineTimes:
    """Return an engine all of whose seconds are longer by a factor."""
    return replace(
        engine, batch_s=tuple(one * factor for one in engine.batch_s), context_s=engine.context_s * factor,
        prefill_s=engine.prefill_s * factor, fill_s=engine.fill_s * factor,
        install_s=engine.install_s * factor, reward_s=engine.reward_s * factor,
    )  # fmt: skip


def slower_learner(learner: LearnerTimes, factor: float) -> LearnerTimes:
    """Return a learner all of whose seconds are longer by a factor."""
    return replace(
        learner, token_s=learner.token_s * factor, microbatch_s=learner.microbatch_s * factor,
        step_s=learner.step_s * factor, publish_s=learner.publish_s * factor,
    )  # fmt: skip
