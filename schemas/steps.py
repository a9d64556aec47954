"""Checks the steps of a run's ledger: their number, and whether a record can be one of them."""

from __future__ import annotations

from schemas.messages import StepRecord
from schemas.runspec import RunSpec


def steps_in(spec: RunSpec) -> int:
    """Return how many optimizer steps a run has."""
    return spec.algorithm.iterations * spec.algorithm.optimizer_steps


def wrong_step(step: StepRecord, spec: RunSpec) -> str:
    """Return why a step can't be one of a run; empty if it can."""
    iteration, mini = divmod(step.step, spec.algorithm.optimizer_steps)
    last = mini + 1 == spec.algorithm.optimizer_steps
    if (step.iteration, step.last_of_iteration) != (iteration, last):
        return f"step {step.step} is not of iteration {step.iteration}"
    if (step.version_in, step.version_out) != (iteration, iteration + last):
        return f"step {step.step} does not lead from weights {step.version_in} to {step.version_out}"
    if not 0 <= step.step < steps_in(spec):
        return f"the run has {steps_in(spec)} steps, and no step {step.step}"
    return ""
