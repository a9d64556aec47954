"""Take a step of a run again, by itself, to see that its bits are the same, or which samples spoil it.

newest checkpoint before it, or the model the run began with ──► the ledger's steps up to it ──► the step

Nothing is written to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from consumers.batches.micro_batches import MicroBatch, micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import Learner
from consumers.learners.optimizing import NotFinite
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.failing import FailedSteps, TrainingFailed
from consumers.steps.ledger import steps_in_ledger
from consumers.steps.redo import RedoneStep, plans_again, take_again, version_trained
from consumers.steps.scoring import Scoring
from consumers.steps.stage_comparison import StageFound, compared
from consumers.steps.step_record import recipe_of
from consumers.stream.recorded_groups import samples_topic
from infra.bus import ends_of
from infra.machine_kind import kind_of_machine
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

    @cached_property
    def stages(self) -> list[StageFound]:
        """What became of each stage."""
        return compared(self.record, self.taken)

    @property
    def equal(self) -> bool:
        """Whether all that the ledger says has the same bits."""
        return all(one.equal is not False for one in self.stages)

    @property
    def same_machine(self) -> bool:
        """Whether the step was taken on this kind of machine; so also if nobody noted on which."""
        return self.record.made_on in ("", kind_of_machine())

    @property
    def as_expected(self) -> bool:
        """Whether bits are equal, or may differ: on another kind of machine, and within the tolerances."""
        return self.equal or (not self.same_machine and all(one.within for one in self.stages))


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


@dataclass(frozen=True)
class _Beginning:
    """Where a replay begins: the next step, and a position in the ledger that is not behind it."""

    step: int
    position: int
    words: str  # for people


class Again:
    """Takes steps of one run again."""

    def __init__(self, handle: RunHandle, learner_of: Callable[[], Learner], progress: StepProgress) -> None:
        self._handle, self._learner_of, self._progress = handle, learner_of, progress
        self._samples = samples_topic(handle)
        self._learner = learner_of()
        self._scoring = Scoring(self._learner, self._learner.loss.needs, at_once=handle.spec.trainer.ranks)

    def step(self, number: int | None) -> Replayed:
        """Take a step of the ledger again; None: the newest."""
        number = self.newest() if number is None else number
        return next(self.each(number, number))

    def each(self, first: int, last: int) -> Iterator[Replayed]:
        """Take some steps of the ledger again, one after the other."""
        newest = self.newest()
        if last > newest:
            raise TrainingFailed(
                f"the ledger of run {self._handle.run} ends with step {newest}: it has no step {last}"
            )
        begin = self._beginning(first)
        others: list[int] = []
        for record in self._records(begin, last):
            self._progress(min(record.step, first) - begin.step, first - begin.step)
            taken = self._take(record)
            if record.step >= first:
                same_recipe = record.recipe == recipe_of(self._handle.spec)
                yield Replayed(record, begin.words, taken, others.copy(), same_recipe)
            if taken.root != record.root_out:
                others.append(record.step)

    def failed(self, number: int | None) -> Spoilt:
        """Find out why a failed step can't be taken; None: the newest failed step."""
        record = FailedSteps(self._handle.store, self._handle.run).find(number)
        begin = self._beginning(record.step)
        for earlier in self._records(begin, record.step - 1):
            self._progress(earlier.step - begin.step, record.step - begin.step)
            self._take(earlier)
        self._begin(record.step)
        rows, plans = plans_again(self._handle, self._samples, self._learner, self._scoring, record)
        batches = [batch for together in plans for batch in together]
        said = record, begin.words, len(rows), len(batches)
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

    def newest(self) -> int:
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

    def _beginning(self, number: int) -> _Beginning:
        """Restore the newest checkpoint before a step, if there is one."""
        found = Checkpoints(self._handle.store, self._handle.run).before(number, self._handle.log.warning)
        if found is None:
            return _Beginning(0, 0, "the model that the run began with")
        manifest, state = found
        self._learner.restore(state)
        words = f"the checkpoint of iteration {manifest.iteration}"
        return _Beginning(manifest.step, manifest.ledger, words)

    def _records(self, begin: _Beginning, last: int) -> Iterator[StepRecord]:
        """Yield the ledger's steps from a beginning up to `last`. Raise TrainingFailed if one is missing."""
        place = begin.step
        for step in steps_in_ledger(self._handle, begin.position) if place <= last else ():
            if step.step < place:
                continue
            if step.step > place:
                break
            yield step
            place += 1
            if place > last:
                break
        if place <= last:
            raise TrainingFailed(
                f"step {last} can't be reached from {begin.words}: the ledger has no usable record of step "
                f"{place}. The record was removed, damaged or given up (streamrl skip); only a replay from a "
                "later checkpoint gets past it (trainer.keep_checkpoints)"
            )

    def _take(self, record: StepRecord) -> RedoneStep:
        self._begin(record.step)
        return take_again(self._handle, self._samples, self._learner, self._scoring, record)

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
