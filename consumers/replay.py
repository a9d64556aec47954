"""Take a step of a run again, by itself, to see that its bits are the same, or which samples spoil it.

newest checkpoint before it, or the model the run began with ──► the ledger's steps up to it ──► the step

Nothing is written to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from consumers.batches.log_places import fetch_rows
from consumers.batches.micro_batches import MicroBatch, micro_batch
from consumers.batches.training_rows import TrainingRow, drawn_again
from consumers.learners.fingerprint import Fingerprint
from consumers.learners.learner import Learner
from consumers.learners.optimizing import NotFinite
from consumers.losses.loss import Needs
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.failing import FailedSteps, TrainingFailed
from consumers.steps.ledger import newest_in_ledger, steps_in_ledger
from consumers.steps.redo import RedoneStep, plans_again, take_again, version_trained
from consumers.steps.scoring import Scoring
from consumers.steps.stage_comparison import StageFound, compared
from consumers.steps.step_record import recipe_of
from consumers.stream.recorded_groups import samples_topic
from consumers.stream.roots import TrainerRoots
from infra.machine_kind import kind_of_machine
from infra.run_handle import RunHandle
from schemas.messages import Sample, StepRecord
from schemas.runspec import RunSpec
from schemas.taken import TakenGroups
from schemas.topics import Topic

StepProgress = Callable[[int, int], None]  # steps taken, of how many


@dataclass(frozen=True)
class Replayed:
    """A step of the ledger, and the result of taking it again."""

    record: StepRecord
    start: str  # checkpoint or model that this began with, for people
    taken: RedoneStep
    others: list[int]  # steps before it that came to other bits
    same_recipe: bool
    sums_exactly: bool = True  # whether gradients are added so that their order does not matter

    @cached_property
    def stages(self) -> list[StageFound]:
        """Each stage, compared with its record."""
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
    def within(self) -> bool:
        """Whether no stage differs by more than the record's tolerance."""
        return all(one.within for one in self.stages)

    @property
    def may_differ(self) -> bool:
        """Whether other bits may be due to the machine, or to ranks that add gradients as floats."""
        return not (self.same_machine and self.sums_exactly)

    @property
    def as_expected(self) -> bool:
        """Whether bits are equal, or may differ and do so within the tolerances."""
        return self.equal or (self.may_differ and self.within)

    @property
    def reason(self) -> str:
        """Why bits may differ, in words, and the limits of that."""
        if not self.same_recipe:
            return (
                "It was taken with other settings, or by another version of StreamRL, so other bits are "
                "no wonder: the version that took it, or that made its step file, comes to the same"
            )
        if not self.same_machine:
            why = f"It was taken on another kind of machine ({self.record.made_on}; here {kind_of_machine()})"
        elif not self.sums_exactly:
            why = "Its ranks add gradients as floats, in an order that may change (trainer.exact_sums)"
        else:
            return "It was taken on this kind of machine, so all bits should be equal: something is wrong."
        if self.within:
            return f"{why}: all differences are within the tolerances that its record has."
        return f"{why}, but a stage differs by more than its record tolerates: something else is wrong."


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
class StateBefore:
    """A learner's state before a step."""

    step: int
    state: Mapping[str, torch.Tensor]
    words: str  # where it comes from, for people


@dataclass(frozen=True)
class TrainedSample:
    """A sample as a step's trainer had it; arrays have an entry for each drawn token."""

    sample: Sample
    logprobs: np.ndarray  # under the weights before the step
    advantage: np.ndarray | None  # None: it had no gradient
    reference: np.ndarray | None  # logprobs under the reference; None: the loss has none


@dataclass(frozen=True)
class CapturedSteps:
    """All that a replay of some steps needs."""

    first: int
    last: int
    state: Mapping[str, torch.Tensor]  # before the first step
    records: Sequence[StepRecord]
    failed: StepRecord | None  # the last step, if it could not be taken
    rows: Sequence[TrainingRow]  # the samples of all steps
    samples: Topic


@dataclass(frozen=True)
class _Beginning:
    """Where a replay begins: the next step, and a position in the ledger that is not behind it."""

    step: int
    position: int
    words: str  # for people


class Again:
    """Takes steps of one run again."""

    def __init__(
        self, handle: RunHandle, learner_of: Callable[[], Learner], progress: StepProgress,
        start: StateBefore | None = None, gpus: AbstractContextManager[None] | None = None,
    ) -> None:  # fmt: skip
        """`start`: a state to begin with; None: the newest checkpoint before a step.

        `gpus`: is entered before there is a learner, and left when it is closed.
        """
        self._handle, self._learner_of, self._progress, self._start = handle, learner_of, progress, start
        self._samples = samples_topic(handle)
        with ExitStack() as unless_made:
            if gpus is not None:
                unless_made.enter_context(gpus)
            self._learner, self._closed = learner_of(), False
            self._at_close = unless_made.pop_all()
        self._scoring = self._new_scoring()
        self._moved = False  # whether the learner is not as it was made
        self._new_past()

    def _new_past(self) -> None:
        """Note that no step is taken yet."""
        self.taken = TakenGroups(self._handle.spec.algorithm)  # groups trained before the next step
        self.roots = TrainerRoots(self._handle.spec, lambda version: None)  # of versions, as the run has them

    def _new_scoring(self) -> Scoring:
        return Scoring(self._learner, self._learner.loss.needs, at_once=self._handle.spec.trainer.ranks)

    def step(self, number: int | None) -> Replayed:
        """Take a step of the ledger again; None: the newest."""
        number = self.newest() if number is None else number
        return next(self.each(number, number))

    def each(self, first: int, last: int) -> Iterator[Replayed]:
        """Take some steps of the ledger again, one after the other."""
        self._check_end(last)
        begin = self._beginning(first)
        others: list[int] = []
        for record in self._records(begin, last):
            self._progress(min(record.step, first) - begin.step, first - begin.step)
            taken = self.take(record)
            if record.step >= first:
                yield self.replayed(record, taken, begin.words, others)
            if taken.root != record.root_out:
                others.append(record.step)

    def replayed(
        self, record: StepRecord, taken: RedoneStep, start: str, others: Sequence[int] = ()
    ) -> Replayed:
        """Return a step that was taken again, beside its record."""
        same_recipe = record.recipe == recipe_of(self._handle.spec)
        trainer = self._handle.spec.trainer
        exact = trainer.sums_exactly or (trainer.ranks == 1 and not trainer.needs_ranks)
        return Replayed(record, start, taken, list(others), same_recipe, exact)

    def reach(self, first: int, last: int) -> Iterator[StepRecord]:
        """Take the steps before `first`, and yield the records of `first` to `last`.

        The caller takes each of them with `take` before it asks for the next one.
        """
        self._check_end(last)
        begin = self._beginning(first)
        for record in self._records(begin, last):
            if record.step >= first:
                yield record
                continue
            self._progress(record.step - begin.step, first - begin.step)
            self.take(record)

    def stand_before(self, number: int) -> str | None:
        """Take the steps before step `number`, so that the learner stands before it.

        Return the root that the weights should have, by the ledger; None if no step had to be taken.
        """
        return self._stand_before(number)[1]

    def _stand_before(self, number: int) -> tuple[_Beginning, str | None]:
        begin, root = self._beginning(number), None
        for record in self._records(begin, number - 1):
            self._progress(record.step - begin.step, number - begin.step)
            self.take(record)
            root = record.root_out
        return begin, root

    def _plans(self, record: StepRecord) -> tuple[list[TrainingRow], list[list[MicroBatch]]]:
        """Begin a step; return its samples with their scores, and its micro-batches."""
        self._begin(record.step)
        return plans_again(self._handle, self._samples, self._learner, self._scoring, record)

    def rows(self, record: StepRecord) -> list[TrainingRow]:
        """Return the samples of a step, in its record's order, without scores."""
        return fetch_rows(self._handle, self._samples, record)

    def failed(self, number: int | None) -> Spoilt:
        """Find out why a failed step can't be taken; None: the newest failed step."""
        record = FailedSteps(self._handle.store, self._handle.run).find(number)
        begin, _ = self._stand_before(record.step)
        rows, plans = self._plans(record)
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
            if self._learner is not trial.learner:
                self._learner = trial.learner
                self._scoring = self._new_scoring()

    def capture(self, first: int | None, last: int | None, *, failed: bool = False) -> CapturedSteps:
        """Return all that a replay of some steps needs; None: the newest step.

        `failed`: of the step that could not be taken, `last`; None: the newest one that failed.
        """
        spoilt = FailedSteps(self._handle.store, self._handle.run).find(last) if failed else None
        last = spoilt.step if spoilt else self.newest() if last is None else last
        first = last if first is None else first
        if spoilt is None:
            self._check_end(last)
        if self.needs.before == "iteration":
            first -= first % self._handle.spec.algorithm.optimizer_steps
        begin = self._beginning(first)
        state = self._learner.state() if begin.step == first else None
        records = []
        for record in self._records(begin, last - 1 if spoilt else last):
            if record.step >= first:
                records.append(record)
                continue
            self._progress(record.step - begin.step, first - begin.step)
            self.take(record)
            if record.step == first - 1:
                state = self._learner.state()
        assert state is not None
        rows = [row for record in (*records, *([spoilt] if spoilt else [])) for row in self.rows(record)]
        return CapturedSteps(first, last, state, records, spoilt, rows, self._samples)

    def gradients(self, record: StepRecord) -> Iterator[Fingerprint]:
        """Yield the fingerprint of what each micro-batch adds to a step's gradient."""
        self._stand_before(record.step)
        rows, plans = self._plans(record)
        total, state = self._learner.loss.total([row.sample for row in rows]), self._learner.state()
        for batch in (batch for plan in plans for batch in plan):
            self._learner.accumulate([batch])
            yield self._learner.step(total).gradient
            self._learner.restore(state)

    def sample(self, record: StepRecord, row: int) -> TrainedSample:
        """Return a sample of a step as the trainer had it, token by token."""
        self._stand_before(record.step)
        rows, plans = self._plans(record)
        mine, advantage = rows[row], None
        for batch in (batch for plan in plans for batch in plan):
            for place, one in enumerate(batch.rows):
                if one is mine:
                    advantage = batch.advantage[batch.owner == place].numpy()
        scored = self._learner.score([[mine]], Needs(before="step"))[0][0]
        assert scored.scores.before is not None
        return TrainedSample(mine.sample, scored.scores.before, advantage, mine.scores.reference)

    @property
    def needs(self) -> Needs:
        """The scores that the run's loss needs."""
        return self._learner.loss.needs

    @property
    def learner(self) -> Learner:
        """The learner that takes the steps."""
        return self._learner

    def close(self) -> None:
        """Close the learner, if that was not done before."""
        if not self._closed:
            self._closed = True
            with self._at_close:
                self._learner.close()

    def newest(self) -> int:
        """Return the number of the ledger's newest step."""
        return newest_step_of(self._handle)

    def _check_end(self, last: int) -> None:
        newest = self.newest()
        if last > newest:
            raise TrainingFailed(no_such_step(self._handle, last, newest))

    def _beginning(self, number: int) -> _Beginning:
        """Restore the newest checkpoint before a step, if there is one."""
        if self._start is not None:
            if number < self._start.step:
                raise TrainingFailed(
                    f"{self._start.words} begins with step {self._start.step}: step {number} lies before it"
                )
            self._learner.restore(self._start.state)
            return _Beginning(self._start.step, 0, self._start.words)
        found = Checkpoints(self._handle.store, self._handle.run).before(number, self._handle.log.warning)
        if found is None:
            if self._moved:  # only a new learner is as the run began
                self._learner.close()
                self._learner = self._learner_of()
                self._scoring = self._new_scoring()
                self._moved = False
            self._new_past()
            if self._handle.spec.algorithm.staleness:
                self.roots.keep(0, self._learner.made().root)
            return _Beginning(0, 0, "the model that the run began with")
        manifest, state = found
        self._learner.restore(state)
        self._new_past()
        self.taken = TakenGroups(
            self._handle.spec.algorithm, manifest.iteration, manifest.taken, manifest.redrawn
        )
        self.roots.keep_all({**manifest.roots, manifest.iteration: manifest.root})
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

    def take(self, record: StepRecord) -> RedoneStep:
        """Take a step again. The learner must stand before it."""
        self._begin(record.step)
        taken = take_again(self._handle, self._samples, self._learner, self._scoring, record)
        self.taken.add(record, drawn_again(taken.rows, self._handle.spec.loss.most_draws))
        if record.last_of_iteration:
            self.roots.keep(record.version_out, record.root_out)
        return taken

    def _begin(self, number: int) -> None:
        self._moved = True
        self._scoring.begin()
        if number % self._handle.spec.algorithm.optimizer_steps == 0:
            self._learner.begin_iteration()


def no_such_step(handle: RunHandle, step: int, newest: int) -> str:
    """Return, for people, that a run's ledger has no step of a number."""
    more = handle.more_words or f", or wait until it is taken (`{handle.command('status')}`)"
    return (
        f"{handle.ledger_words} ends with step {newest}: it has no step {step}. Name a step up to "
        f"{newest}{more}"
    )


def newest_step_of(handle: RunHandle) -> int:
    """Return the number of the ledger's newest step. Raises TrainingFailed if it has none."""
    found = newest_in_ledger(handle)
    if found is None:
        more = handle.more_words or (
            f": none is taken yet, or its records were removed. `{handle.command('status')}` says how far "
            "it is"
        )
        raise TrainingFailed(f"{handle.ledger_words} has no step{more}")
    return found


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
