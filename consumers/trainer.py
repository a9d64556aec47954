"""The trainer: streamed samples in, optimizer steps out, each recorded in the ledger before anyone sees it.

samples ──► bundles ──► micro-batches, in whichever order they complete ──► sums of their gradients
                                                                               │
ledger ◄── record ◄── optimizer step ◄── the last bundle of the step ◄─────────┘
             └──► weights, announcement, checkpoint (publisher's thread)

waits for                      unblocked by
bundles of a step              the generators
in a colocated run, its turn   the generators: when all samples of an iteration are here, their engines rest
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from consumers.batches.cutting import trained_next
from consumers.batches.log_places import Gone
from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow, drawn_again
from consumers.learners.learner import Learner
from consumers.learners.optimizing import NotFinite, Stepped, rate_share
from consumers.ranks.choose_learner import learner_of
from consumers.ranks.trainer_door import TrainerDoor
from consumers.steps.checkpoint import AnyCheckpointManifest, Checkpoints, RunPosition
from consumers.steps.failed_rewards import FailedRewards
from consumers.steps.failing import FailedSteps, TrainingFailed, named
from consumers.steps.ledger import Ledger
from consumers.steps.length_balance import LengthBalance
from consumers.steps.publisher import Publisher
from consumers.steps.redo import take_again, update, version_trained
from consumers.steps.scoring import Scoring
from consumers.steps.step_metrics import OptimizerUpdate
from consumers.steps.step_record import StepParts, recipe_of, step_record
from consumers.steps.telling import tell
from consumers.stream.arrival_stream import ArrivalStream
from consumers.stream.recorded_groups import RecordedStream, Replay, samples_topic
from consumers.stream.roots import TrainerRoots
from consumers.stream.sample_stream import Bundle, SampleStream, StepKey, Stream
from infra import epochs
from infra.logs import at_step
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.roles.turns import learners_turn
from infra.stores.store import StoreError
from infra.waiting import Wait
from schemas.algorithm import AlgorithmSection
from schemas.messages import StepRecord
from schemas.taken import TakenGroups

_POLL_S = 0.1
_FENCE_S = 5.0  # between looks for a newer trainer, while there is nothing to do


class Trainer:
    """Trains a run to its last iteration."""

    def __init__(self, context: RoleContext, learner: Learner) -> None:
        self._context, self._learner, self._loss = context, learner, learner.loss
        self._spec = context.spec
        self._algorithm: AlgorithmSection = context.spec.algorithm
        self._offline = self._algorithm.mode == "offline"
        self._turn = learners_turn(context)
        self._samples = samples_topic(context)
        self._replay: Replay | None = None
        self._recipe = recipe_of(context.spec)
        self._start = epochs.begin(context.store, context.run, "trainer")
        self._epoch, self._looked = self._start.number, time.monotonic()
        self._scoring = Scoring(learner, learner.loss.needs, at_once=self._spec.trainer.ranks)
        self._publisher = Publisher(context, self._epoch, learner.base).open()
        self._checkpoints = Checkpoints(
            context.store, context.run, moved=self._publisher.moved, store_id=context.record.store_id
        )
        self._ledger = Ledger(context, self._epoch, self._start.check)
        self._failed_rewards = FailedRewards(context.run, self._spec.task.max_failed_rewards)
        self._roots = TrainerRoots(context.spec, self._published_root)
        self._taken = TakenGroups(self._algorithm)
        self._balance: LengthBalance | None = None  # in order arrival
        self._iteration, self._mini, self._number = 0, 0, 0  # the next step
        self._root = ""
        self._updates = 0  # of the weights: steps without a gradient make none

    def run(self) -> None:
        """Train from the newest checkpoint, over the steps that the ledger has behind it, to the end."""
        try:
            manifest = self._restore()
            redone = self._redo(manifest.ledger if manifest else 0)
            self._taken.make_up(self._number)
            if self._algorithm.order == "arrival":
                self._balance = LengthBalance(self._algorithm, self._iteration + bool(self._mini))
            with contextlib.closing(self._open(manifest)) as stream:
                if redone and not self._mini:
                    self._checkpoint(stream)  # another crash must not cost these steps again
                while self._iteration < self._algorithm.iterations:
                    if (record := self._ledger.standing(self._number)) is not None:
                        self._follow(stream, record)
                    else:
                        self._train_step(stream)
                self._turn.pass_on(self._learner.rest)
                self._publisher.drain()
            self._context.log.info("%d iterations are trained", self._iteration)
        finally:
            self._publisher.close()
            self._ledger.close()
            self._turn.close()

    def _open(self, manifest: AnyCheckpointManifest | None) -> Stream:
        if self._offline:
            return RecordedStream(self._context, self._learner.vocabulary).open()
        if self._spec.loss.old_groups:
            self._replay = Replay(self._context, self._number)
        begins = (
            self._context, self._learner.vocabulary, manifest.positions if manifest else {},
            (self._iteration, self._mini), self._roots.of,
        )  # fmt: skip
        fence, letters = self._start.check, manifest.letters if manifest else 0
        if self._algorithm.order == "arrival":
            return ArrivalStream(*begins, taken=self._taken, fence=fence, letters=letters).open()
        return SampleStream(*begins, fence=fence, letters=letters).open()

    def _published_root(self, version: int) -> str | None:
        found = self._publisher.find(version)
        return None if found is None else found.root

    def _restore(self) -> AnyCheckpointManifest | None:
        """Restore the newest checkpoint and return its manifest; None if there is no checkpoint."""
        manifest = self._checkpoints.restored(self._restore_learner, self._context.log.warning)
        if manifest is None:
            if (fork := self._context.record.fork) is not None:
                raise TrainingFailed(
                    f"run {self._context.run} is a fork of {fork.words}, and the checkpoint to begin with is "
                    "missing: remove this run (streamrl rm), and fork again"
                )
            self._came_to(self._learner.made().root)
            return None
        self._iteration, self._number = manifest.iteration, manifest.step
        self._roots.keep_all(manifest.roots)
        self._taken = TakenGroups(self._algorithm, manifest.iteration, manifest.taken, manifest.redrawn)
        self._came_to(manifest.root)
        self._context.log.info("resumed at iteration %d from its checkpoint", manifest.iteration)
        return manifest

    def _restore_learner(self, state: Mapping[str, torch.Tensor]) -> None:
        self._learner.restore(state)
        self._updates = int(state["steps"]) if "steps" in state else 0

    def _came_to(self, root: str) -> None:
        """Note that the weights have this root now; between two iterations they are a version."""
        self._root = root
        if not self._mini:
            self._roots.keep(self._iteration, root)

    def _redo(self, position: int) -> int:
        """Take the ledger's steps behind a position again, exactly as recorded; return their number."""
        first = self._number
        self._ledger.rest(position, first)
        newest = self._publisher.newest()
        records = self._ledger.read_on(first)  # a version's steps are written before it is published
        if newest <= self._iteration and not any(record.last_of_iteration for record in records):
            self._publish()
        while records:
            self._context.heart.working("taking steps again")
            for record in records:
                self._take_again(record, newest)
            newest = self._publisher.newest()
            records = self._ledger.read_on(self._number)
        if newest > self._iteration:
            self._go_past(f"the ledger has no step {self._number}", self._number)
            self._publish()
        return self._number - first

    def _take_again(self, record: StepRecord, published: int) -> None:
        """Take a step again as it is recorded. `published`: number of the newest published version."""
        self._context.check_stop()
        if record.step > self._number:
            self._go_past(f"the ledger has step {record.step} and no step {self._number}", record.step)
        if record.step < self._number:
            self._taken.add(record)
            return  # the published weights include it
        self._turn.take()
        at_step(record.step)
        self._begin()
        try:
            taken = take_again(self._context, self._samples, self._learner, self._scoring, record)
        except Gone as error:
            self._taken.add(record)
            self._go_past(str(error), record.step + 1)
            return
        except NotFinite as error:
            raise TrainingFailed(
                f"step {record.step} can't be taken again: {error}; samples {named(error.rows)}"
            ) from error
        self._updates += bool(taken.batches)
        self._taken.add(record, drawn_again(taken.rows, self._spec.loss.most_draws))
        root = taken.root if taken.root == record.root_out else self._adopt(record, taken.root)
        self._advance(record.last_of_iteration)
        self._came_to(root)
        if record.last_of_iteration and record.version_out >= published:
            self._publish()  # the newest too: it may not have been announced
        self._context.log.info("step %d taken again from the ledger", record.step)

    def _adopt(self, record: StepRecord, root: str) -> str:
        """Use the published weights of a step whose bits this machine computes otherwise; return the root."""
        published = self._publisher.find(record.version_out) if record.last_of_iteration else None
        self._context.log.warning(
            "step %d has other bits than the ledger says (another kind of machine, or number of ranks?)%s",
            record.step, "; its published weights are used" if published else "",
        )  # fmt: skip
        if published is None:
            return root
        self._learner.adopt(self._publisher.fetch(record.version_out))
        return published.root

    def _go_past(self, why: str, until: int) -> None:
        """Pass over the steps before `until`, which can't be taken again.

        If weights of a later version are published, they are used; otherwise the steps' learning is lost.
        """
        first, newest = self._number, self._publisher.newest()
        if newest > self._iteration and (found := self._publisher.find(newest)) is not None:
            self._learner.adopt(self._publisher.fetch(newest))
            self._iteration, self._mini = newest, 0
            self._number = newest * self._algorithm.optimizer_steps
            self._came_to(found.root)
            kept = f"weights {newest}, which are published, are used; the optimizer's moments"
        else:
            while self._number < until:
                if not self._mini:
                    self._learner.begin_iteration()  # `until` may lie within one
                self._advance((self._number + 1) % self._algorithm.optimizer_steps == 0)
                self._came_to(self._root)
                if not self._mini:
                    self._publish()
            kept = "no weights of them are published, so what they learned is lost; weights and moments"
        self._context.log.warning(
            "steps %d to %d can't be taken again (%s): %s are as they were before step %d",
            first, self._number - 1, why, kept, first,
        )  # fmt: skip

    def _follow(self, stream: Stream, record: StepRecord) -> None:
        """Take a step that another trainer, thought dead, has recorded already: its record counts."""
        self._take_again(record, self._publisher.newest())
        iteration, mini = divmod(self._number - 1, self._algorithm.optimizer_steps)
        if self._replay is not None:
            self._replay.add(record)
        self._taken.make_up(self._number)
        stream.trained((iteration, mini))
        if not self._mini:
            self._checkpoint(stream)

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
        """Publish the weights between two iterations."""
        self._publisher.publish(self._iteration, self._learner.made())

    def _train_step(self, stream: Stream) -> None:
        """Take one optimizer step: accumulate bundles as they get complete, until the step has all."""
        at_step(self._number)
        key: StepKey = (self._iteration, self._mini)
        self._begin()
        step = self._collect(stream, key)
        heart, began = self._context.heart, time.monotonic()
        heart.working("stepping")
        try:
            done = update(self._learner, step.rows, step.number, any_gradient=step.any_gradient)
            made = self._learner.made()
            if made.found.wrong:
                raise NotFinite(f"the optimizer step left NaN or infinity in {made.found.wrong}")
        except NotFinite as error:
            raise self._failure(step, error) from error
        step.compute_s += time.monotonic() - began
        record = self._record(step, made.root, self._with_rate(done))
        self._note_balance(record)
        heart.working("recording")
        self._ledger.append(record)
        last = record.last_of_iteration
        if self._replay is not None:
            self._replay.add(record)
        self._taken.add(record, drawn_again(step.rows, self._spec.loss.most_draws))
        self._advance(last)
        self._came_to(made.root)
        stream.trained(key)
        tell(self._context, record, duplicates=stream.duplicates)
        if last:
            heart.working("publishing")
            self._publisher.publish(self._iteration, made)
            every = self._spec.trainer.checkpoint_every
            if self._iteration % every == 0 or self._iteration == self._algorithm.iterations:
                self._checkpoint(stream)
        self._failed_rewards.took(record)

    def _collect(self, stream: Stream, key: tuple[int, int]) -> StepParts:
        step = StepParts(self._iteration, self._number)
        wait = self._context.wait(f"samples of iteration {key[0]}", unblocked_by="the generators")
        if self._spec.placement.takes_turns:
            self._let_engines_draw(stream, step, key, wait)
        if self._replay is not None and (rows := self._replay.rows(self._number)):
            self._train(step, rows)
            step.replayed = len(rows)
        groups = self._algorithm.groups // self._algorithm.optimizer_steps
        while step.groups < groups:
            self._context.check_stop()
            self._publisher.check()
            ready = [bundle for bundle in stream.complete(key) if bundle.number not in step.taken]
            if together := self._chosen(ready, missing=stream.outstanding(key)):
                self._turn.take()
                self._context.heart.working("training")
                self._train(step, [row for bundle in together for row in bundle.in_order()])
                step.taken.update(bundle.number for bundle in together)
                step.groups += sum(bundle.settled(self._spec.loss.most_draws) for bundle in together)
                stream.pump(0.0)
                wait.progress()
                continue
            since = time.monotonic()
            if not self._spec.placement.takes_turns and (parts := self._scoring.missing(stream.groups(key))):
                self._context.heart.working("scoring")
                self._scoring.score(parts)
                step.compute_s += time.monotonic() - since
                stream.pump(0.0)
                wait.progress()
                continue
            self._await_samples(stream, step, key, wait, missing=stream.outstanding(key))
        return step

    def _let_engines_draw(self, stream: Stream, step: StepParts, key: StepKey, wait: Wait) -> None:
        """In a colocated run, wait until all samples of the iteration are here; then take the turn."""
        stream.pump(0.0)
        while missing := self._outstanding(stream, key):
            self._context.check_stop()
            self._publisher.check()
            self._await_samples(stream, step, key, wait, missing=missing)
        since = time.monotonic()
        self._turn.take()
        step.waited_s += time.monotonic() - since

    def _outstanding(self, stream: Stream, key: StepKey) -> int:
        """Return how many samples are not here of an iteration's steps from this one on."""
        stream.complete(key)  # in order arrival, the step chooses its groups by this
        iteration, mini = key
        last = self._algorithm.optimizer_steps if self._algorithm.order == "window" else mini + 1
        return sum(stream.outstanding((iteration, one)) for one in range(mini, last))

    def _await_samples(
        self, stream: Stream, step: StepParts, key: StepKey, wait: Wait, *, missing: int
    ) -> None:
        """Wait a moment for samples. In a colocated run the engines draw meanwhile."""
        since = time.monotonic()
        self._turn.pass_on(self._learner.rest)
        here = sum(len(rows) for rows in stream.groups(key))
        self._context.heart.counters["held"] = max(0, here - len(step.rows))
        self._context.heart.waiting(
            f"{missing} samples of iteration {key[0]}", unblocked_by="generators", cause="samples"
        )
        self._look_for_a_newer_one()
        wait.progress() if stream.pump(_POLL_S) else wait.check()
        step.waited_s += time.monotonic() - since

    def _look_for_a_newer_one(self) -> None:
        """Look for a newer trainer now and then, and raise if there is one: this one would wait in vain."""
        if time.monotonic() > self._looked + _FENCE_S:
            self._start.check()
            self._looked = time.monotonic()

    def _chosen(self, ready: Sequence[Bundle], *, missing: int) -> Sequence[Bundle]:
        """Choose the bundles to train next: one as composed at admission, or all that are here if it pays."""
        count = trained_next(
            self._spec, len(ready),
            lambda: sum(row.sample.true_length for bundle in ready for row in bundle.in_order()),
            missing=bool(missing), whole_step=self._loss.whole_step,
        )  # fmt: skip
        return ready[:count]

    def _train(self, step: StepParts, rows: Sequence[TrainingRow]) -> None:
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

    def _with_rate(self, done: OptimizerUpdate) -> OptimizerUpdate:
        """Count an update of the weights, and add the learning rate that it had."""
        if not done.total:
            return done
        self._updates += 1
        return replace(
            done, learning_rate=self._algorithm.learning_rate * rate_share(self._updates, self._spec)
        )

    def _record(self, step: StepParts, root: str, done: OptimizerUpdate) -> StepRecord:
        return step_record(
            step, run=self._context.run, trainer_epoch=self._epoch, recipe=self._recipe,
            dtype=self._spec.model.dtype,
            last=self._mini + 1 == self._algorithm.optimizer_steps, root=root, update=done,
        )  # fmt: skip

    def _note_balance(self, record: StepRecord) -> None:
        """Add to a step's metrics whether order arrival trains all lengths alike."""
        if self._balance is not None:
            self._balance.add(record)
            if record.last_of_iteration and (ratio := self._balance.ratio(record.iteration)) is not None:
                record.metrics["length_balance"] = ratio

    def _failure(self, step: StepParts, error: NotFinite) -> TrainingFailed:
        """Keep the failed step's record in the store, as the ledger has none; return the error to raise."""
        store, run = self._context.store, self._context.run
        what = f"step {step.number}: {error}; samples {named(error.rows or step.rows)}"
        try:
            FailedSteps(store, run).keep(self._record(step, "", OptimizerUpdate(Stepped(math.nan))))
        except StoreError as lost:
            return TrainingFailed(f"{what}. The record of this step could not be kept in the store: {lost}")
        return TrainingFailed(
            f"{what}. To find the samples that cause this: streamrl replay {run} --failed --store {store.url}"
        )

    def _checkpoint(self, stream: Stream) -> None:
        self._context.heart.working("checkpointing")
        place = self._checkpoints.place(self._iteration, self._epoch)
        snapshot, positions = self._learner.snapshot(place), stream.low_watermarks()
        state = self._checkpoints.begin(snapshot, place)
        letters, roots = stream.letters(positions), self._roots.known()
        at = RunPosition(
            iteration=self._iteration, trainer_epoch=self._epoch, step=self._number, root=self._root,
            positions=positions, ledger=self._ledger.position(self._number), letters=letters, roots=roots,
            taken=self._taken.known(), redrawn=self._taken.redrawn(),
        )  # fmt: skip
        keep, deadline_s = self._spec.trainer.keep_checkpoints, self._spec.deadlines.progress_s
        self._publisher.submit(
            lambda: self._checkpoints.save(
                state, at, keep=keep, deadline_s=deadline_s, check=self._learner.check
            ),
            dropped=snapshot.abandon,
        )


def body(context: RoleContext) -> None:
    """Run the trainer's role: load the learner, and train."""
    context.record = context.record.with_code("loss", "trainer")
    door = None
    if context.spec.placement.ranks.elsewhere:
        door = TrainerDoor(context.store, context.record, context.log, context)
    learner = learner_of(context.record.model, context.spec, run=context.run, log=context.log, door=door)
    try:
        context.loaded()
        Trainer(context, learner).run()
    finally:
        learner.close()


if __name__ == "__main__":
    sys.exit(run_role("trainer", body))
