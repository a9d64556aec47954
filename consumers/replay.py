"""Take a step of a run again, by itself, to see that its bits are the same, or which samples spoil it.

newest checkpoint before it, or the model the run began with ──► the ledger's steps up to it ──► the step

Nothing is written to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from consumers.batches.micro_batches import MicroBatch, micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import Learner
from consumers.learners.optimizing import NotFinite
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.failing import FailedSteps, TrainingFailed
from consumers.steps.ledger import steps_in_ledger
from consumers.steps.redo import RedoneStep, plans_again, take_again, version_trained
from consumers.steps.scoring import Scoring
from consumers.steps.step_record import recipe_of
from consumers.stream.recorded_groups import samples_topic
from infra.bus import ends_of
from infra.run_handle import RunHandle
from schemas.messages import StepRecord
from schemas.runspec import RunSpec

StepProgress = Callable[[int, int], None]  # steps taken, of how many
_TAIL = 64  # records at the ledger's end that are searched first for the newest step


@dataclass(frozen=True)
class Replayed:
    """A step of the ledger, and the result of taking it again."""

    record: StepRecord
    start: str  # checkpoint or model that this began with, for people
    taken: RedoneStep
    others: list[int]  # steps before it that came to other bits
    same_recipe: bool

    @property
    def equal(self) -> bool:
        """Whether weights and losses have the same bits as in the ledger."""
        losses = [stat.loss for stat in self.taken.stats]
        return self.taken.root == self.record.root_out and losses == self.record.losses.tolist()


@dataclass(frozen=True)
class Spoilt:
    """A failed step, and why it can't be taken."""

    record: StepRecord
    start: str
    samples: int
    batches: int
    reason: str  # empty: the step can be taken, this time
    batch: int | None = None  # the first micro-batch that can't be trained; None: only all together can't
    members: Sequence[str] = ()  # ids of that micro-batch's samples
    alone: Sequence[tuple[str, str]] = ()  # samples that can't be trained even by themselves, and why


class Again:
    """Takes steps of one run again."""

    def __init__(self, handle: RunHandle, learner_of: Callable[[], Learner], progress: StepProgress) -> None:
        self._handle, self._learner_of, self._progress = handle, learner_of, progress
        self._samples = samples_topic(handle)
        self._learner = learner_of()
        self._scoring = Scoring(self._learner, self._learner.loss.needs, at_once=handle.spec.trainer.ranks)

    def step(self, number: int | None) -> Replayed:
        """Take a step of the ledger again; None: the newest."""
        newest = self._newest()
        number = newest if number is None else number
        if number > newest:
            raise TrainingFailed(
                f"the ledger of run {self._handle.run} ends with step {newest}: it has no step {number}"
            )
        start, others, record = self._up_to(number, wanted=True)
        assert record is not None
        self._begin(number)
        taken = take_again(self._handle, self._samples, self._learner, self._scoring, record)
        return Replayed(record, start, taken, others, record.recipe == recipe_of(self._handle.spec))

    def failed(self, number: int | None) -> Spoilt:
        """Find out why a failed step can't be taken; None: the newest failed step."""
        record = FailedSteps(self._handle.store, self._handle.run).find(number)
        start, *_ = self._up_to(record.step, wanted=False)
        self._begin(record.step)
        rows, plans = plans_again(self._handle, self._samples, self._learner, self._scoring, record)
        batches = [batch for together in plans for batch in together]
        said = record, start, len(rows), len(batches)
        trial = _Trial(self._learner_of, self._learner)
        try:
            for place, batch in enumerate(batches):
                if reason := trial.of([batch], 1.0):
                    each = [
                        (row, _alone(row, rows, trial.learner, self._handle.spec, record))
                        for row in batch.rows
                    ]
                    alone = [(row.sample.id, why) for row, one in each if (why := trial.of([one], 1.0))]
                    return Spoilt(*said, reason, place, [row.sample.id for row in batch.rows], alone)
            return Spoilt(*said, trial.of(batches, trial.learner.loss.total([row.sample for row in rows])))
        finally:
            self._learner = trial.learner

    def close(self) -> None:
        """Close the learner."""
        self._learner.close()

    def _newest(self) -> int:
        """Return the number of the ledger's newest step."""
        end = ends_of(self._handle.bus, self._handle.topics.ledger)[0]
        back = _TAIL
        while True:
            found = [step.step for step in steps_in_ledger(self._handle, max(0, end - back))]
            if found or back >= end:
                break
            back *= 8
        if not found:
            raise TrainingFailed(f"run {self._handle.run} has no step in its ledger")
        return found[-1]

    def _up_to(self, number: int, *, wanted: bool) -> tuple[str, list[int], StepRecord | None]:
        """Bring the learner to where a step begins.

        Returns where this began, the earlier steps that came to other bits, and the step's record. With
        `wanted` the ledger must have that record; otherwise it is None.
        """
        found = Checkpoints(self._handle.store, self._handle.run).before(number, self._handle.log.warning)
        first, position, start = 0, 0, "the model that the run began with"
        if found is not None:
            manifest, state = found
            self._learner.restore(state)
            first, position = manifest.step, manifest.ledger
            start = f"the checkpoint of iteration {manifest.iteration}"
        others: list[int] = []
        place, record = first, None
        for step in steps_in_ledger(self._handle, position) if wanted or first < number else ():
            if step.step < first:
                continue
            if step.step != place or place == number:
                record = step if step.step == number == place else None
                break
            self._progress(place - first, number - first)
            self._begin(place)
            taken = take_again(self._handle, self._samples, self._learner, self._scoring, step)
            if taken.root != step.root_out:
                others.append(place)
            place += 1
            if place == number and not wanted:
                break
        if place < number or (wanted and record is None):
            raise TrainingFailed(
                f"step {number} can't be reached from {start}: the ledger has no usable record of step "
                f"{place}. The record was removed, damaged or given up (streamrl skip); only a replay from a "
                "later checkpoint gets past it (trainer.keep_checkpoints)"
            )
        self._progress(number - first, number - first)
        return start, others, record

    def _begin(self, number: int) -> None:
        self._scoring.begin()
        if number % self._handle.spec.algorithm.optimizer_steps == 0:
            self._learner.begin_iteration()


def _alone(
    row: TrainingRow, rows: Sequence[TrainingRow], learner: Learner, spec: RunSpec, record: StepRecord
) -> MicroBatch:
    """Return a micro-batch of one sample, with the advantage that it has among all rows."""
    worth = learner.loss.advantages(rows)[next(n for n, one in enumerate(rows) if one is row)]
    return micro_batch([row], [worth], learner.loss, version_trained(spec, record.step))


class _Trial:
    """Tries micro-batches out, each time from the same state of the learner."""

    def __init__(self, learner_of: Callable[[], Learner], learner: Learner) -> None:
        self._learner_of, self.learner, self._state = learner_of, learner, learner.state()

    def of(self, batches: Sequence[MicroBatch], total: float) -> str:
        """Return why these micro-batches can't be trained; empty if they can."""
        try:
            self.learner.accumulate(batches)
            self.learner.step(total or 1.0)
        except NotFinite as error:
            self.learner.close()
            self.learner = self._learner_of()  # what was accumulated is spoilt
            reason = str(error)
        else:
            wrong = self.learner.made().found.wrong
            reason = f"the optimizer step leaves NaN or infinity in {wrong}" if wrong else ""
        self.learner.restore(self._state)
        return reason
