"""Finds a step in a run's ledger by its number, or by a sample that it trained."""

from __future__ import annotations

import numpy as np

from consumers.replay import newest_step_of, no_such_step
from consumers.steps.ledger import steps_in_ledger
from flows.run.request import RunFailed
from infra.bus import begins_of, ends_of
from infra.run_handle import RunHandle
from schemas.admission import iteration_of
from schemas.identity import is_sample_id, sample_key
from schemas.messages import StepRecord
from schemas.topics import Topic


def step_record_of(handle: RunHandle, number: int) -> StepRecord:
    """Return the record of a step. Raises RunFailed if the ledger has none."""
    newest = newest_step_of(handle)
    if number > newest:
        raise RunFailed(no_such_step(handle, number, newest))
    for record in steps_in_ledger(handle, handle.ledger_before(number)):
        if record.step == number:
            return record
    raise RunFailed(
        f"the ledger of run {handle.run} has no usable record of step {number}, though its newest is "
        f"{newest}: the record was removed, damaged or given up (streamrl skip), or the run is a "
        "fork that began later"
    )


def first_kept_step(handle: RunHandle, samples: Topic) -> int | None:
    """Return the first step from which on the log or the archive has all samples; None if there is none."""
    begins, first = begins_of(handle.bus, samples), None
    ends = ends_of(handle.bus, samples)
    for record in steps_in_ledger(handle):
        places = zip(record.partitions.tolist(), record.offsets.tolist(), strict=True)
        if all(begins.get(part, 0) <= offset < ends.get(part, 0) for part, offset in places):
            first = record.step if first is None else first
        else:
            first = None
    return first


def find_sample(handle: RunHandle, name: str, step: int | None) -> tuple[StepRecord, int]:
    """Return the step that trained a sample, the first one or `step`, and the place in its record."""
    if not is_sample_id(name):
        raise RunFailed(f"{name[:60]} is no sample's id, such as 0000097-02")
    group, index = sample_key(name)
    algorithm = handle.spec.algorithm
    earliest = 0
    if algorithm.order == "window":
        earliest = iteration_of(group, algorithm.groups) * algorithm.optimizer_steps
    for record in steps_in_ledger(handle, handle.ledger_before(earliest if step is None else step)):
        places = np.flatnonzero((record.groups == group) & (record.indexes == index))
        if places.size and step in (None, record.step):
            return record, int(places[0])
    raise RunFailed(
        f"no step of run {handle.run} has trained sample {name}"
        + ("" if step is None else f" as step {step}")
        + handle.more_words
    )
