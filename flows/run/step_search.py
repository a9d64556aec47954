"""Finds a step in a run's ledger by its number, or by a sample that it trained."""

from __future__ import annotations

import numpy as np

from consumers.steps.ledger import steps_in_ledger
from flows.run.request import RunFailed
from infra.run_handle import RunHandle
from schemas.admission import iteration_of
from schemas.identity import is_sample_id, sample_key
from schemas.messages import StepRecord


def step_record_of(handle: RunHandle, number: int) -> StepRecord:
    """Return the record of a step. Raises RunFailed if the ledger has none."""
    for record in steps_in_ledger(handle, _position(handle, number)):
        if record.step == number:
            return record
    newest = max((record.step for record in steps_in_ledger(handle)), default=None)
    there = "has no step yet" if newest is None else f"has no step {number}; its newest is {newest}"
    raise RunFailed(f"{handle.ledger_words} {there}{handle.more_words}")


def find_sample(handle: RunHandle, name: str, step: int | None) -> tuple[StepRecord, int]:
    """Return the step that trained a sample, the first one or `step`, and the place in its record."""
    if not is_sample_id(name):
        raise RunFailed(f"{name[:60]} is no sample's id, such as 0000097-02")
    group, index = sample_key(name)
    algorithm = handle.spec.algorithm
    earliest = 0
    if algorithm.order == "window":
        earliest = iteration_of(group, algorithm.groups) * algorithm.optimizer_steps
    for record in steps_in_ledger(handle, _position(handle, earliest if step is None else step)):
        places = np.flatnonzero((record.groups == group) & (record.indexes == index))
        if places.size and step in (None, record.step):
            return record, int(places[0])
    raise RunFailed(
        f"no step of run {handle.run} has trained sample {name}"
        + ("" if step is None else f" as step {step}")
        + handle.more_words
    )


def _position(handle: RunHandle, step: int) -> int:
    """Return a position in the ledger that is not behind a step: each one before it has a record."""
    fork = handle.record.fork
    return max(0, step - (fork.step if fork else 0))
