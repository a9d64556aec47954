"""Simulates a run file as somebody asks for it: with other generators, failures, and longer answers.

With `placement.balance` the number of generators changes, as it would in the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from flows.planning.machine_pools import MachinePool, PlanError
from flows.planning.preemption import BACK_S, NOTICE_S, Preemption
from flows.planning.step_estimate import MachineSplit
from flows.planning.workload import DrawnLengths
from flows.plans.given_split import given_split
from flows.plans.measured_times import MeasuredTimes
from flows.plans.plan_rows import figure, figures_row, sources_of, split_row, split_words
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.simulated_split import Scaled, SplitFigures, iterations_for, simulated_run, split_figures
from flows.simulation.simulated_run import Outage, SimulatedRun
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import simulate
from schemas.shortening import shown

_STEADY = 4000  # samples, about, if nobody says how many iterations
_CHANGING = 60  # iterations, if they are not all alike
_ASSUMED_START_S = 30.0  # until a new generator is ready, if no profile says it
_MOST_FACTORS = 100
_MOST_GENERATORS = 20_000
_FAILURE = re.compile(r"(?P<place>\d{1,6})@(?P<at>\d{1,9}(\.\d{1,6})?)(\+(?P<back>\d{1,9}(\.\d{1,6})?))?")
_PREEMPTION = re.compile(
    r"((?P<name>[a-z0-9][a-z0-9-]{0,48})=)?(?P<rate>\d{1,2}(\.\d{1,6})?)(/h)?"
    r"(,notice=(?P<notice>\d{1,5}(\.\d{1,3})?))?(,back=(?P<back>\d{1,6}(\.\d{1,3})?))?"
)
_MOST_PREEMPTED = 60.0  # times an hour
_COUNT = re.compile(r"((?P<name>[a-z0-9][a-z0-9-]{0,48})=)?(?P<count>\d{1,6})")


@dataclass(frozen=True)
class AskedSimulation:
    """A simulated run with what was asked."""

    inputs: PlanningInputs
    split: MachineSplit
    figures: SplitFigures
    result: Simulation
    seed: int
    lengths: tuple[float, ...]  # factors, spread evenly over the iterations
    start_s: float  # of a new generator

    @property
    def middle(self) -> int:
        """The iteration of the picture."""
        return len(self.result.steps) // 2

    @property
    def is_balanced(self) -> bool:
        """Whether the number of its generators may change."""
        return self.inputs.spec.placement.balance is not None

    @property
    def cost_per_1000(self) -> float:
        """The cost of 1,000 samples; of all samples if not all iterations are alike."""
        if self.is_balanced or self.result.preempted:
            return self.result.cost / self.result.samples * 1000
        return self.figures.cost_per_1000

    @property
    def title(self) -> str:
        """The title of the picture."""
        generators, trainer = split_words(self.split)
        first = f"{self.inputs.spec.run}: a step takes {figure(self.figures.step_s)} s"
        return f"{first}\n{generators}; trainer: {trainer}"


def simulate_asked(
    inputs: PlanningInputs, *, generators: Sequence[str] = (), failures: Sequence[str] = (),
    preempted: Sequence[str] = (),
    lengths: str = "1", iterations: int | None = None, seed: int = 0, start_s: float | None = None,
    picture: bool = False,
) -> AskedSimulation:  # fmt: skip
    """Return a simulated run. Raises PlanError if words can't be read, SimulationError if nothing goes on.

    `start_s`: of a new generator; None: as the profile says, or as is assumed.
    """
    factors, spec = _factors(lengths), inputs.spec
    split = given_split(inputs, _counts(inputs, generators) if generators else None)
    balance = spec.placement.balance
    if balance is not None or len(factors) > 1:
        many = iterations or min(spec.algorithm.iterations, _CHANGING)
    else:
        many = iterations or iterations_for(spec, split.lookahead, samples=_STEADY)
    run = simulated_run(
        spec, split, inputs.workload, iterations=many, seed=seed,
        scaled=Scaled(lengths=factors[0] if len(factors) == 1 else 1.0),
        failures=tuple(_outage(one, split) for one in failures), picture_of=many // 2 if picture else None,
    )  # fmt: skip
    pool = _balanced(split)
    starts_s = _start_s(inputs, pool) if start_s is None else start_s
    run = replace(_preempted(run, preempted), balance=balance, balanced=pool.name, start_s=starts_s)
    if len(factors) > 1:
        run = replace(run, workload=_changing(run, inputs, factors, many))
    result = simulate(run)
    samples = spec.algorithm.groups * spec.algorithm.group_size
    figures = split_figures(split, result, samples)
    return AskedSimulation(inputs, split, figures, result, seed, factors, starts_s)


def _factors(asked: str) -> tuple[float, ...]:
    try:
        found = tuple(float(one) for one in asked.split(","))
    except ValueError:
        found = ()
    if not 0 < len(found) <= _MOST_FACTORS or not all(
        math.isfinite(one) and 0 < one <= 1000 for one in found
    ):
        raise PlanError(
            f"--lengths {shown(asked)}: a factor is a number above 0, at most 1000; several, as in 1,3,1, "
            "are gone through over the run"
        )
    return found


def _changing(
    run: SimulatedRun, inputs: PlanningInputs, factors: Sequence[float], iterations: int
) -> DrawnLengths:
    """Return lengths that go from one factor to the next, evenly over the run."""
    drawn = inputs.workload.draw(run.spec, run.seed, iterations=iterations)
    places = np.linspace(0, len(factors) - 1, iterations)
    by_group = np.repeat(np.interp(places, range(len(factors)), factors), run.spec.algorithm.groups)
    answers = np.rint(drawn.answers * by_group[:, None])
    most = run.spec.sampling.max_tokens
    return replace(
        drawn, answers=np.clip(answers, 1, most).astype(np.int64), predicted=drawn.predicted * by_group
    )


def _start_s(inputs: PlanningInputs, pool: MachinePool) -> float:
    """Return the seconds until a new generator of a pool is ready."""
    times = inputs.times
    found = times.start_s(pool.hardware) if isinstance(times, MeasuredTimes) else None
    return _ASSUMED_START_S if found is None else found


def _balanced(split: MachineSplit) -> MachinePool:
    """Return the pool whose generators come and go: as in a run, one beside the trainer, if there is any."""
    pools = [kind.pool for kind, _ in split.generators]
    return next((pool for pool in pools if not pool.site), pools[0])


def _counts(inputs: PlanningInputs, asked: Sequence[str]) -> dict[str, int]:
    """Return how many generators each pool has. A number without a name is for the first that generates."""
    first = next((pool.name for pool in inputs.pools if pool.generates), "")
    found: dict[str, int] = {}
    for one in asked:
        read = _COUNT.fullmatch(one)
        if read is None or int(read["count"]) > _MOST_GENERATORS:
            raise PlanError(
                f"--generators {shown(one)}: write a number, at most {_MOST_GENERATORS:,}, or NAME=NUMBER "
                "with the name of machines"
            )
        found[read["name"] or first] = int(read["count"])
    return found


def _outage(asked: str, split: MachineSplit) -> Outage:
    read = _FAILURE.fullmatch(asked)
    if read is None:
        raise PlanError(
            f"--fail {shown(asked)}: write GENERATOR@SECOND, or GENERATOR@SECOND+SECONDS if it comes back, "
            "such as 0@30+20"
        )
    many = sum(count for _, count in split.generators)
    if int(read["place"]) >= many:
        raise PlanError(f"--fail {asked}: there are {many} generators, counted from 0")
    back_s = float(read["back"]) if read["back"] else math.inf
    return Outage(int(read["place"]), float(read["at"]), back_s)


def generators_words(result: Simulation) -> str:
    """Return how many generators there were at the end of each iteration, in words."""
    runs: list[tuple[int, int]] = []
    for step in result.steps:
        many = runs.pop()[1] if runs and runs[-1][0] == step.generators else 0
        runs.append((step.generators, many + 1))
    each = ", ".join(f"{count} for {many}" for count, many in runs)
    return f"generators, by iterations: {each}"


def _preempted(run: SimulatedRun, asked: Sequence[str]) -> SimulatedRun:
    """Return a run whose machines are taken away as is asked; without a name, the first that generate."""
    found, names = {}, [site.name for site in run.sites]
    for one in asked:
        read = _PREEMPTION.fullmatch(one)
        if read is None or float(read["rate"]) > _MOST_PREEMPTED or float(read["back"] or BACK_S) <= 0:
            raise PlanError(
                f"--preempt {shown(one)}: write [NAME=]RATE[/h][,notice=SECONDS][,back=SECONDS], with a rate "
                f"of at most {_MOST_PREEMPTED:g} an hour and back above 0, such as "
                "cheap=2/h,notice=30,back=120"
            )
        if (name := read["name"] or names[0]) not in names:
            raise PlanError(f"--preempt {one}: generators stand on {', '.join(names)}, and none on {name}")
        found[name] = Preemption(
            float(read["rate"]), float(read["notice"] or NOTICE_S), float(read["back"] or BACK_S)
        )
    sites = (replace(one, preemption=found.get(one.name, one.preemption)) for one in run.sites)
    return replace(run, sites=tuple(sites))


def asked_row(found: AskedSimulation) -> dict[str, object]:
    """Return all figures, for JSON."""
    result = found.result
    return {
        "run": found.inputs.spec.run,
        "seed": found.seed,
        "lengths": found.lengths[0] if len(found.lengths) == 1 else list(found.lengths),
        "split": split_row(found.split),
        "figures": figures_row(found.figures),
        "iterations": len(result.steps),
        "samples": result.samples,
        "virtual_s": result.ended_at,
        "cost_per_1000": found.cost_per_1000,
        "balance": [asdict(one) for one in result.changes] if found.is_balanced else None,
        "generators": [step.generators for step in result.steps],
        "start_s": found.start_s,
        "preempted": result.preempted,
        "moves": result.moves,
        "handed_over": result.handed_over,
        "drawn_again": result.drawn_again,
        "steps": [step.ended_at for step in result.steps],
        "sources": sources_of(found.inputs, found.split),
    }
