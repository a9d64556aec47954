"""Take a step of the ledger again: its samples by position, in its order, in its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from consumers.batches.log_places import fetch_rows
from consumers.batches.micro_batches import MicroBatch, planned_as
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import Learner
from consumers.learners.optimizing import Stepped
from consumers.losses.objective import LossStats
from consumers.steps.failing import TrainingFailed, named
from consumers.steps.scoring import Scoring
from consumers.steps.stage_marks import StageMarks, stage_marks
from consumers.steps.step_metrics import OptimizerUpdate
from infra.run_handle import RunHandle
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from schemas.topics import Topic


@dataclass(frozen=True)
class RedoneStep:
    """The result of taking a step again."""

    rows: Sequence[TrainingRow]
    batches: Sequence[MicroBatch]
    stats: Sequence[LossStats]
    update: OptimizerUpdate
    root: str

    @property
    def marks(self) -> StageMarks:
        """The marks of its stages, to compare with those in the ledger."""
        return stage_marks(self.rows, self.batches, self.stats, self.update, self.root)


def take_again(
    handle: RunHandle, samples: Topic, learner: Learner, scoring: Scoring, record: StepRecord
) -> RedoneStep:
    """Take a step again, exactly as recorded. The caller must have begun it in `scoring` and `learner`."""
    rows, plans = plans_again(handle, samples, learner, scoring, record)
    stats = [stat for batches in plans for stat in learner.accumulate(batches)]
    batches = [batch for batches in plans for batch in batches]
    done = update(learner, rows, record.step, any_gradient=bool(batches))
    return RedoneStep(rows, batches, stats, done, learner.made().root)


def plans_again(
    handle: RunHandle, samples: Topic, learner: Learner, scoring: Scoring, record: StepRecord
) -> tuple[list[TrainingRow], list[list[MicroBatch]]]:
    """Return the samples of a step with their scores, and its micro-batches, plan by plan."""
    rows = scoring.scored(fetch_rows(handle, samples, record))
    version = version_trained(handle.spec, record.step)
    return rows, planned_as(rows, record.microbatches.tolist(), learner.loss, version)


def version_trained(spec: RunSpec, step: int) -> int:
    """Return the version whose samples need no correction; -1 if there is none.

    It is the version that the iteration begins with. At later steps of the iteration the weights have moved
    on, so it counts there only if the loss keeps the iteration's first weights as anchor.
    """
    iteration, mini = divmod(step, spec.algorithm.optimizer_steps)
    if spec.algorithm.mode == "offline" or (mini and not spec.loss.anchors_at_start):
        return -1
    return iteration


def update(
    learner: Learner, rows: Sequence[TrainingRow], step: int, *, any_gradient: bool
) -> OptimizerUpdate:
    """Take the optimizer step over all that was accumulated.

    Without any gradient no step is taken, and the norm is 0: AdamW's momentum would move the weights all
    the same. Raises TrainingFailed if no sample has a reward.
    """
    if not any_gradient and any(not row.sample.reward_error for row in rows):
        return OptimizerUpdate(Stepped(0.0))
    total = learner.loss.total([row.sample for row in rows])
    if not total:
        errors = sorted({row.sample.reward_error for row in rows})
        raise TrainingFailed(
            f"step {step}: no sample has a reward: {'; '.join(errors[:3]) or 'there are no samples'}. "
            f"Mend the task's reward; samples {named(rows)}"
        )
    return OptimizerUpdate(learner.step(total), total)
