"""Simulates a run file as somebody asks for it: with other generators, failures, and longer answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from flows.planning.machine_pools import PlanError
from flows.planning.step_estimate import MachineSplit
from flows.plans.given_split import given_split
from flows.plans.plan_rows import figure, figures_row, sources_of, split_row, split_words
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.simulated_split import Scaled, SplitFigures, iterations_for, simulated_run, split_figures
from flows.simulation.simulated_run import Outage
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import simulate
from schemas.shortening import shown

_STEADY = 4000  # samples, about, if nobody says how many iterations
_MOST_GENERATORS = 20_000
_FAILURE = re.compile(r"(?P<place>\d{1,6})@(?P<at>\d{1,9}(\.\d{1,6})?)(\+(?P<back>\d{1,9}(\.\d{1,6})?))?")
_COUNT = re.compile(r"((?P<name>[a-z0-9][a-z0-9-]{0,48})=)?(?P<count>\d{1,6})")


@dataclass(frozen=True)
class AskedSimulation:
    """A simulated run with what was asked."""

    inputs: PlanningInputs
    split: MachineSplit
    figures: SplitFigures
    result: Simulation
    seed: int
    lengths: float

    @property
    def middle(self) -> int:
        """The iteration of the picture."""
        return len(self.result.steps) // 2

    @property
    def title(self) -> str:
        """The title of the picture."""
        generators, trainer = split_words(self.split)
        first = f"{self.inputs.spec.run}: a step takes {figure(self.figures.step_s)} s"
        return f"{first}\n{generators}; trainer: {trainer}"


def simulate_asked(
    inputs: PlanningInputs, *, generators: Sequence[str] = (), failures: Sequence[str] = (),
    lengths: float = 1.0, iterations: int | None = None, seed: int = 0, picture: bool = False,
) -> AskedSimulation:  # fmt: skip
    """Return a simulated run. Raises PlanError if words can't be read, SimulationError if nothing goes on."""
    if not (math.isfinite(lengths) and 0 < lengths <= 1000):
        raise PlanError(f"--lengths {lengths:g}: a factor is a number above 0, at most 1000")
    split = given_split(inputs, _counts(inputs, generators) if generators else None)
    many = iterations or iterations_for(inputs.spec, split.lookahead, samples=_STEADY)
    run = simulated_run(
        inputs.spec, split, inputs.workload, iterations=many, seed=seed, scaled=Scaled(lengths=lengths),
        failures=tuple(_outage(one, split) for one in failures), picture_of=many // 2 if picture else None,
    )  # fmt: skip
    result = simulate(run)
    samples = inputs.spec.algorithm.groups * inputs.spec.algorithm.group_size
    return AskedSimulation(inputs, split, split_figures(split, result, samples), result, seed, lengths)


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


def asked_row(found: AskedSimulation) -> dict[str, object]:
    """Return all figures, for JSON."""
    result = found.result
    return {
        "run": found.inputs.spec.run,
        "seed": found.seed,
        "lengths": found.lengths,
        "split": split_row(found.split),
        "figures": figures_row(found.figures),
        "iterations": len(result.steps),
        "samples": result.samples,
        "virtual_s": result.ended_at,
        "moves": result.moves,
        "drawn_again": result.drawn_again,
        "steps": [step.ended_at for step in result.steps],
        "sources": sources_of(found.inputs, found.split),
    }
