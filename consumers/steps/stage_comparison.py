"""Compares a step that was taken again with its record, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consumers.learners.fingerprint import distance
from consumers.steps.redo import RedoneStep
from consumers.steps.stage_marks import VECTORS, StageMarks
from schemas.messages import StepRecord
from schemas.stages import Stage


@dataclass(frozen=True)
class StageFound:
    """One stage of a step: whether it came to the recorded bits, and otherwise how far it is from them."""

    stage: Stage
    equal: bool | None  # None: the record does not say
    apart: float = 0.0  # in the unit of `schemas.stages.MEANINGS`; NaN: nobody can tell
    tolerance: float = 0.0
    row: int | None = None  # the sample that is farthest apart, by its place in the record

    @property
    def within(self) -> bool:
        """Whether another kind of machine may differ by so much."""
        return self.equal is not False or self.apart <= self.tolerance


def compared(record: StepRecord, taken: RedoneStep) -> list[StageFound]:
    """Compare each stage with its record."""
    marks, found = taken.marks, []
    for stage in Stage:
        equal = _equal(stage, record, taken, marks)
        if equal is not False:
            found.append(StageFound(stage, equal))
            continue
        apart, row = _apart(stage, record, taken, marks)
        known = record.tolerances.size > stage
        found.append(StageFound(stage, equal, apart, float(record.tolerances[stage]) if known else 0.0, row))
    return found


def _equal(stage: Stage, record: StepRecord, taken: RedoneStep, marks: StageMarks) -> bool | None:
    if record.stages.size > stage:
        theirs, ours = int(record.stages[stage]), int(marks.stages[stage])
        if stage in VECTORS and not (theirs and ours):  # of a learner that takes no fingerprints
            return None
        return theirs == ours
    match stage:  # a record of before stages were recorded
        case Stage.LOSS:
            return record.losses.tolist() == [stat.loss for stat in taken.stats]
        case Stage.NORM:
            said = record.metrics.get("grad_norm")
            return None if said is None else said == taken.update.norm
        case Stage.WEIGHTS:
            return record.root_out == taken.root
    return None


def _apart(
    stage: Stage, record: StepRecord, taken: RedoneStep, marks: StageMarks
) -> tuple[float, int | None]:
    """Return how far a stage is from its record, and the row that is farthest."""
    match stage:
        case Stage.REWARD:
            said = [math.nan if row.sample.reward_error else row.sample.reward for row in taken.rows]
            return _farthest(record.rewards, np.array(said, dtype=np.float32))
        case Stage.ADVANTAGE:
            return _farthest(record.advantages, marks.advantages)
        case Stage.SCORES:
            return _farthest(record.scores, marks.scores)
        case Stage.LOGPROBS:
            return _farthest(record.logprobs, marks.logprobs)
        case Stage.LOSS:
            ours = [stat.loss for stat in taken.stats]
            most = float(np.abs(record.losses).max(initial=0.0))
            apart, batch = _farthest(record.losses, np.array(ours))
            return _share(apart, most), None if batch is None else _first_row(taken, batch)
        case Stage.NORM:
            said_norm = record.metrics.get("grad_norm", math.nan)
            return _share(abs(said_norm - taken.update.norm), abs(said_norm)), None
        case Stage.GRADIENT | Stage.OPTIMIZER | Stage.WEIGHTS:
            return _vectors_apart(stage, record, taken, marks), None
    return math.nan, None


def _vectors_apart(stage: Stage, record: StepRecord, taken: RedoneStep, marks: StageMarks) -> float:
    number = VECTORS.index(stage)
    if record.sizes.size <= number:
        return math.nan
    theirs, ours = (np.split(one, len(VECTORS))[number] for one in (record.sketches, marks.sketches))
    apart = distance(ours.astype(float), theirs.astype(float))
    if stage is Stage.WEIGHTS:
        rate = record.metrics.get("learning_rate", 0.0)
        return _share(apart, rate * math.sqrt(taken.update.taken.weights.count))
    return _share(apart, float(record.sizes[number]))


def _first_row(taken: RedoneStep, batch: int) -> int:
    """Return the place in the record of a micro-batch's first sample."""
    return next(n for n, row in enumerate(taken.rows) if row is taken.batches[batch].rows[0])


def _share(apart: float, whole: float) -> float:
    return apart / whole if whole else (math.inf if apart else 0.0)


def _farthest(theirs: np.ndarray, ours: np.ndarray) -> tuple[float, int | None]:
    """Return the largest difference between two rows of numbers, and its place."""
    if theirs.size != ours.size or not theirs.size:
        return math.nan, None
    apart = np.abs(theirs.astype(np.float64) - ours)
    apart[np.isnan(theirs) & np.isnan(ours)] = 0.0
    apart[np.isnan(apart)] = math.inf  # one of them is no number
    row = int(apart.argmax())
    return float(apart[row]), row if apart[row] else None


def first_other(found: Sequence[StageFound]) -> StageFound | None:
    """Return the first stage that has other bits; None if all are equal."""
    return next((one for one in found if one.equal is False), None)
