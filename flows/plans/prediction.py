"""Predicts what a run will do, where a profile was measured: `python -m flows.plans.prediction RUNFILE …`.

It is a process of its own, so that no run waits for it. It prints a line of JSON with the speed, and then one
with the time of both sides and a picture (`predicted_iteration`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from flows.planning.machine_pools import MachinePool
from flows.planning.step_estimate import GeneratorKind, MachineSplit, StepEstimator, TrainerKind
from flows.plans.drawn_factors import drawn_factors, speed_spread
from flows.plans.given_split import given_split
from flows.plans.planning_inputs import PlanningInputs, demand_of_workload, planning_inputs, profile_at_hand
from flows.plans.predicted_iteration import iteration_row
from flows.plans.predicted_speed import Prediction, has_profile
from flows.plans.run_plan import interval_around, interval_of
from flows.plans.simulated_split import (
    Scaled,
    iterations_for,
    longer,
    simulated_split,
    slower_engine,
    slower_learner,
    slower_link,
)
from infra.errors import Explained
from schemas.loading import RunFileError, load_run_file
from schemas.runspec import RunSpec

# Samples of steady iterations that are simulated, and such iterations: with fewer of them chance has a say.
# Generators that are the slower side are ahead at first, and lose that lead over a dozen iterations.
_SAMPLES, _MOST_STEADY = 12_000, 24
_SAMPLES_FOR_CAUSES = 4_000  # likewise, for shares of the time and the picture
_MOST_SAMPLES = 24_000  # that are simulated while a run begins; beyond, a formula has to do
_BUDGET = 24_000  # samples that are simulated for its range
_DRAWS = 12  # of formulas
_NICE = 19  # the run beside it goes first


def predictions(spec: RunSpec, runfile: str) -> Iterator[dict[str, Any]]:
    """Yield the speed that a run file's run is expected to have, and then where its time goes.

    Nothing comes without a profile, or where it can't be said.
    """
    try:
        if spec.algorithm.mode == "offline" or not has_profile(spec):
            return
        if profile_at_hand(spec, runfile, None) is None:
            return
        inputs = planning_inputs(spec, runfile=runfile)
        split = given_split(inputs)
        found = prediction_of(inputs, split)
        if found is None:
            return
        yield asdict(found)
        if found.simulated:
            iterations = iterations_for(spec, split.lookahead, samples=_SAMPLES_FOR_CAUSES)
            yield iteration_row(inputs, split, iterations)
    except (Explained, RunFileError):  # a prediction is beside the point of a run: it never keeps one from it
        return


def prediction_of(inputs: PlanningInputs, split: MachineSplit) -> Prediction | None:
    """Return what a split is expected to do; None where that can't be said."""
    step_s, simulated = expected_step(inputs, split)
    if not math.isfinite(step_s):
        return None
    if simulated:
        found = interval_of(inputs, split, step_s, budget=_BUDGET)
    else:
        others = [estimated_s(inputs, split, one) for one in drawn_factors(inputs, split, _DRAWS)]
        found = interval_around(step_s, [math.log(one / step_s) for one in others], speed_spread(split))
    samples = inputs.spec.algorithm.groups * inputs.spec.algorithm.group_size
    return Prediction(found, found.rate(samples / found.value), simulated)


def expected_step(inputs: PlanningInputs, split: MachineSplit) -> tuple[float, bool]:
    """Return the seconds of a split's step, infinite if nobody can say them, and whether it was simulated."""
    spec = inputs.spec
    iterations = iterations_for(spec, split.lookahead, samples=_SAMPLES, most=_MOST_STEADY)
    samples = spec.algorithm.groups * spec.algorithm.group_size
    estimate_s = estimated_s(inputs, split, Scaled())
    if not math.isfinite(estimate_s) or iterations * samples > _MOST_SAMPLES:
        return estimate_s, False
    found = simulated_split(spec, split, inputs.workload, iterations=iterations, most_samples=_MOST_SAMPLES)
    return found.step_s, True


def estimated_s(inputs: PlanningInputs, split: MachineSplit, scaled: Scaled) -> float:
    """Return the time of a step by formulas, with other times of its parts and other lengths."""
    kinds = [
        (GeneratorKind(_linked(kind.pool, scaled), slower_engine(kind.engine, scaled.engine),
                       kind.tensor_parallel), count)
        for kind, count in split.generators
    ]  # fmt: skip
    learner = slower_learner(split.trainer.learner, scaled.learner)
    trainer = TrainerKind(split.trainer.pool, learner, split.trainer.devices)
    demand = inputs.demand
    if scaled.lengths != 1.0:
        demand = demand_of_workload(inputs.spec, longer(inputs.workload, scaled.lengths))
    changed = MachineSplit(trainer, tuple(kinds), split.lookahead, split.takes_turns)
    return float(StepEstimator(demand, [kind for kind, _ in kinds]).step_s([changed])[0])


def _linked(pool: MachinePool, scaled: Scaled) -> MachinePool:
    return replace(pool, link=slower_link(pool.link, scaled.link))


def main() -> int:
    """Print a prediction as lines of JSON; nothing if there is none."""
    parser = argparse.ArgumentParser(prog="python -m flows.plans.prediction", description=__doc__)
    parser.add_argument("runfile")
    parser.add_argument("overrides", nargs="*", help="changed settings, as A.B=VALUE")
    given = parser.parse_args()
    os.nice(_NICE)
    for found in predictions(load_run_file(given.runfile, given.overrides), given.runfile):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()  # the speed is told before the rest is known
    return 0


if __name__ == "__main__":
    sys.exit(main())
