"""The trainer: streamed samples in, optimizer steps out, each recorded in the ledger before anyone sees it.

samples ──► bundles ──► micro-batches, in whichever order they complete ──► sums of their gradients
                                                                               │
ledger ◄── record ◄── optimizer step ◄── the last bundle of the step ◄─────────┘
             └──► weights, announcement, checkpoint (publisher's thread)

waits for            unblocked by
bundles of a step    the generators
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence

from consumers.batching import plan
from consumers.checkpoint import Checkpoints, next_trainer_epoch
from consumers.failing import FailedSteps, TrainingFailed, named, not_finite
from consumers.learner import Learner
from consumers.learners import learner_of
from consumers.ledger import Ledger, steps_of
from consumers.optimizing import NotFinite
from consumers.publisher import Publisher
from consumers.record import Step, recipe_of, step_record
from consumers.recorded import RecordedStream, Replay, samples_topic
from consumers.redo import take_again, update, version_trained
from consumers.rows import Row
from consumers.scoring import Scoring
from consumers.stream import Bundle, SampleStream, Stream
from infra.logs import at_step
from infra.process import Context, run_role
from infra.store import StoreError
from infra.weights.digest import digests_of, root_digest
from schemas.messages import StepRecord
from schemas.runspec import AlgorithmSection

_POLL_S = 0.1
# Larger differences between trainer and generator on the same weights mean that one of them computes wrongly.
_GAP_LIMIT = {"float32": 0.01, "bfloat16": 0.5}


class Trainer:
    """Trains a run to its last iteration."""

    def __init__(self, context: Context, learner: Learner) -> None:
        self._context, self._learner, self._loss = context, learner, learner.loss
        self._spec = context.spec
        self._algorithm: AlgorithmSection = context.spec.algorithm
        self._offline = self._algorithm.mode == "offline"
        self._samples = samples_topic(context)
        self._replay: Replay | None = None
        self._recipe = recipe_of(context.spec)
        self._epoch = next_trainer_epoch(context.store, context.run)
        self._scoring = Scoring(learner, learner.loss.needs, at_once=self._spec.trainer.ranks)
        self._checkpoints = Checkpoints(context.store, context.run)
        self._publisher = Publisher(context, self._epoch, learner.base)
        self._ledger = Ledger(context, self._epoch)
        self._iteration, self._mini, self._number = 0, 0, 0  # the next step
        self._root = ""

    def run(self) -> None:
        """From the newest checkpoint, over the steps that the ledger has behind it, to the end."""
        try:
            positions, ledger = self._restore()
            redone = self._redo(ledger)
            with contextlib.closing(self._open(positions)) as stream:
                if redone and not self._mini:
                    self._checkpoint(stream)  # another crash shall not cost these steps once more
                while self._iteration < self._algorithm.iterations:
                    self._train_step(stream)
                self._publisher.drain()
            self._context.log.info("%d iterations are trained", self._iteration)
        finally:
            self._publisher.close()
            self._ledger.close()

    def _open(self, positions: dict[int, int]) -> Stream:
        if self._offline:
            return RecordedStream(self._context, self._learner.vocabulary)
        if self._spec.loss.replay:
            self._replay = Replay(self._context, steps_of(self._context))
        key, vocabulary = (self._iteration, self._mini), self._learner.vocabulary
        return SampleStream(self._context, vocabulary, positions, key, self._publisher.root)

    def _restore(self) -> tuple[dict[int, int], int]:
        """From the newest checkpoint, or the beginning: positions of samples, and of the ledger."""
        found = self._checkpoints.latest(self._context.log.warning)
        if found is None:
            self._root = root_digest(digests_of(self._learner.weights()))
            return {}, 0
        manifest, state = found
        self._learner.restore(state)
        self._iteration, self._number, self._root = manifest.iteration, manifest.step, manifest.root
        self._context.log.info("resumed at iteration %d from its checkpoint", manifest.iteration)
        return manifest.positions, manifest.ledger

    def _redo(self, position: int) -> int:
        """Take the ledger's steps behind a position again, exactly as recorded; how many those were."""
        records = [record for record in self._ledger.rest(position) if record.step >= self._number]
        if not any(record.last_of_iteration for record in records):
            self._publish()
        published = self._publisher.newest()
        for record in records:
            self._context.check_stop()
            if record.step > self._number:
                raise TrainingFailed(
                    f"the ledger has step {record.step} and no step {self._number}: records are gone, and "
                    "the newest checkpoint is older (placement.kafka.retention_hours)"
                )
            at_step(record.step)
            self._begin()
            try:
                taken = take_again(self._context, self._samples, self._learner, self._scoring, record)
            except NotFinite as error:
                raise TrainingFailed(
                    f"step {record.step} can't be taken again: {error}; samples {named(error.rows)}"
                ) from error
            self._root = taken.root
            if self._root != record.root_out:
                self._adopt(record)
            self._advance(record.last_of_iteration)
            if record.last_of_iteration and record.version_out >= published:
                self._publish()  # the newest too: it may not have been announced
            self._context.log.info("step %d taken again from the ledger", record.step)
        return len(records)

    def _adopt(self, record: StepRecord) -> None:
        """This machine computes other bits than the one before: what was published is what counts."""
        published = self._publisher.find(record.version_out) if record.last_of_iteration else None
        self._context.log.warning(
            "step %d has other bits than the ledger says (another kind of machine, or number of ranks?)%s",
            record.step, "; its published weights are used" if published else "",
        )  # fmt: skip
        if published is not None:
            self._learner.adopt(self._publisher.fetch(record.version_out))
            self._root = published.root

    def _advance(self, last_of_iteration: bool) -> None:
        self._number += 1
        self._iteration, self._mini = (
            (self._iteration + 1, 0) if last_of_iteration else (self._iteration, self._mini + 1)
        )

    def _begin(self) -> None:
        self._scoring.begin()
        if self._mini == 0:
            self._learner.begin_iteration()

    def _publish(self) -> None:
        """The weights between two iterations."""
        self._publisher.publish(self._iteration, self._learner.weights())

    def _train_step(self, stream: Stream) -> None:
        """One optimizer step: whatever is complete is accumulated, until all is."""
        at_step(self._number)
        key = (self._iteration, self._mini)
        self._begin()
        step = self._collect(stream, key)
        began = time.monotonic()
        try:
            norm = update(self._learner, step.rows, step.number, any_gradient=step.any_gradient)
            weights = self._learner.weights()
            if wrong := not_finite(weights):
                raise NotFinite(f"the optimizer step left NaN or infinity in {wrong}")
        except NotFinite as error:
            raise self._failure(step, error) from error
        step.compute_s += time.monotonic() - began
        self._root = root_digest(digests_of(weights))
        record = self._record(step, self._root, norm)
        self._ledger.append(record)
        last = record.last_of_iteration
        if self._replay is not None:
            self._replay.add(record)
        stream.trained(key)
        self._advance(last)
        self._report(record, stream)
        if last:
            self._publisher.publish(self._iteration, weights)
            every = self._spec.trainer.checkpoint_every
            if self._iteration % every == 0 or self._iteration == self._algorithm.iterations:
                self._checkpoint(stream)

    def _collect(self, stream: Stream, key: tuple[int, int]) -> Step:
        step = Step(self._iteration, self._number)
        if self._replay is not None and (rows := self._replay.rows(self._number)):
            self._train(step, rows)
        groups = self._algorithm.groups // self._algorithm.optimizer_steps
        wait = self._context.wait(f"samples of iteration {key[0]}", unblocked_by="the generators")
        while step.groups < groups:
            self._context.check_stop()
            self._publisher.check()
            ready = [bundle for bundle in stream.complete(key) if bundle.number not in step.taken]
            if together := self._chosen(ready, missing=stream.outstanding(key)):
                self._context.heart.working("training")
                self._train(step, [row for bundle in together for row in bundle.in_order()])
                step.taken.update(bundle.number for bundle in together)
                step.groups += sum(bundle.settled(self._spec.loss.resample or 0) for bundle in together)
                stream.pump(0.0)
                wait.progress()
                continue
            since = time.monotonic()
            if parts := self._scoring.missing(stream.groups(key)):
                self._context.heart.working("scoring")
                self._scoring.score(parts)
                step.compute_s += time.monotonic() - since
                stream.pump(0.0)
                wait.progress()
                continue
            here = sum(len(rows) for rows in stream.groups(key))
            self._context.heart.counters["held"] = max(0, here - len(step.rows))
            self._context.heart.waiting(
                f"{stream.outstanding(key)} samples of iteration {key[0]}", unblocked_by="generators"
            )
            wait.progress() if stream.pump(_POLL_S) else wait.check()
            step.waited_s += time.monotonic() - since
        return step

    def _chosen(self, ready: Sequence[Bundle], *, missing: int) -> Sequence[Bundle]:
        """What to train next: a bundle as it was decided at admission, or all that is there if it pays."""
        if self._loss.whole_step:
            return [] if missing else ready
        if not self._spec.composes_on_arrival:
            return ready[:1]
        tokens = sum(row.sample.true_length for bundle in ready for row in bundle.in_order())
        return ready if not missing or tokens >= self._spec.trainer.bundle_tokens else []

    def _train(self, step: Step, rows: Sequence[Row]) -> None:
        began = time.monotonic()
        scored = self._scoring.scored(rows)
        version, trainer = version_trained(self._spec, step.number), self._spec.trainer
        planned = plan(scored, self._loss, trainer.microbatch_tokens, version, parts=trainer.parts)
        step.plans.append(planned)
        try:
            step.stats += self._learner.accumulate(planned.batches)
        except NotFinite as error:
            raise self._failure(step, error) from error
        step.compute_s += time.monotonic() - began

    def _record(self, step: Step, root: str, norm: float) -> StepRecord:
        return step_record(
            step, run=self._context.run, trainer_epoch=self._epoch, recipe=self._recipe,
            last=self._mini + 1 == self._algorithm.optimizer_steps, root=root, norm=norm,
        )  # fmt: skip

    def _failure(self, step: Step, error: NotFinite) -> TrainingFailed:
        """Nothing of it is in the ledger: what it was made of is kept beside."""
        store, run = self._context.store, self._context.run
        what = f"step {step.number}: {error}; samples {named(error.rows or step.rows)}"
        try:
            FailedSteps(store, run).keep(self._record(step, "", math.nan))
        except StoreError as lost:
            return TrainingFailed(f"{what}. What it was made of could not be kept: {lost}")
        return TrainingFailed(
            f"{what}. To take it again and see which samples do that: "
            f"streamrl replay {run} --failed --store {store.url}"
        )

    def _report(self, record: StepRecord, stream: Stream) -> None:
        metrics = record.metrics
        counters = self._context.heart.counters
        counters.update(
            step=record.step, iteration=record.iteration, version=record.version_out,
            trained=counters.get("trained", 0) + len(record.rewards),
            trained_tokens=counters.get("trained_tokens", 0) + metrics["tokens"],
            duplicates=stream.duplicates,
        )  # fmt: skip
        if metrics["gap_tokens"] and metrics["logprob_gap"] > _GAP_LIMIT[self._spec.model.dtype]:
            self._context.log.warning(
                "the generators' logprobs differ by %.3g from the trainer's on the same weights: one of them "
                "computes wrongly (stale weights, another temperature, another model?)",
                metrics["logprob_gap"],
            )  # fmt: skip
        if metrics["skipped"]:
            counters["skipped_steps"] = counters.get("skipped_steps", 0) + 1
            self._context.log.warning(
                "in no group do rewards differ: there is no gradient, and the weights stay as they are"
            )
        self._context.log.info(
            "iteration %d reward %.3f, length %.1f, staleness %.2f, waited %.2f s, computed %.2f s",
            record.iteration, metrics["reward"], metrics["length"], metrics["staleness"],
            metrics["waited_s"], metrics["compute_s"],
        )  # fmt: skip

    def _checkpoint(self, stream: Stream) -> None:
        state, positions = self._learner.state(), stream.low_watermarks()
        iteration, number, root, ledger = self._iteration, self._number, self._root, self._ledger.end
        self._publisher.submit(
            lambda: self._checkpoints.save(
                state, keep=self._spec.trainer.keep_checkpoints, iteration=iteration, step=number, root=root,
                positions=positions, ledger=ledger, trainer_epoch=self._epoch,
            )
        )  # fmt: skip


def body(context: Context) -> None:
    """What the trainer does."""
    learner = learner_of(context.record.model, context.spec, run=context.run, log=context.log)
    try:
        context.loaded()
        Trainer(context, learner).run()
    finally:
        learner.close()


if __name__ == "__main__":
    sys.exit(run_role("trainer", body))
