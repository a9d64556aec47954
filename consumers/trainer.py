"""The trainer: streamed samples in, optimizer steps out, each recorded in the ledger before anyone sees it.

samples ──► bundles ──► micro-batches, in whichever order they complete ──► sums that don't depend on it
                                                                               │
ledger ◄── record ◄── optimizer step ◄── the last bundle of the step ◄─────────┘
             └──► weights, announcement, checkpoint (publisher's thread)

waits for            unblocked by
bundles of a step    the generators
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from consumers.batching import Plan, plan, token_weight
from consumers.checkpoint import Checkpoints, next_trainer_epoch
from consumers.learner import Learner, NotFinite, TorchLearner
from consumers.loss import LossStats
from consumers.metrics import step_metrics
from consumers.publisher import Publisher
from consumers.redo import fetch_rows, steps_after
from consumers.stream import Row, SampleStream
from infra.errors import Explained
from infra.logs import at_step
from infra.process import Context, run_role
from infra.waiting import Wait
from infra.weights.digest import digests_of, root_digest
from schemas.messages import StepRecord
from schemas.runspec import AlgorithmSection, RunSpec
from schemas.wire import encode

_POLL_S = 0.1
# Larger differences between trainer and generator on the same weights mean that one of them computes wrongly.
_GAP_LIMIT = {"float32": 0.01, "bfloat16": 0.5}


class TrainingFailed(Explained):
    """A step that can't be taken; the message names the step and its samples."""


@dataclass
class _Step:
    """What an optimizer step is made of, as it grows."""

    rows: dict[int, tuple[Plan, list[LossStats]]] = field(default_factory=dict)  # by bundle
    compute_s: float = 0.0
    waited_s: float = 0.0


def recipe_of(spec: RunSpec) -> str:
    """Hash of the settings that a step's bits depend on."""
    settings = [
        spec.algorithm.model_copy(update={"iterations": 1}).model_dump_json(),
        spec.sampling.model_dump_json(), spec.model.dtype, spec.trainer.microbatch_tokens,
        spec.trainer.logits_chunk, spec.trainer.threads, spec.trainer.exact_sums,
    ]  # fmt: skip
    return hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()


class Trainer:
    """Trains a run to its last iteration."""

    def __init__(self, context: Context, learner: Learner) -> None:
        self._context, self._learner = context, learner
        self._spec = context.spec
        self._algorithm: AlgorithmSection = context.spec.algorithm
        self._recipe = recipe_of(context.spec)
        self._epoch = next_trainer_epoch(context.store, context.run)
        self._checkpoints = Checkpoints(context.store, context.run)
        self._publisher = Publisher(context, self._epoch)
        self._iteration, self._mini, self._number = 0, 0, 0  # the next step
        self._ledger_end = 0
        self._root = ""

    def run(self) -> None:
        """From the newest checkpoint, over the steps that the ledger has behind it, to the end."""
        try:
            positions = self._restore()
            self._redo()
            self._publish()
            stream = SampleStream(
                self._context, self._learner.vocabulary, positions, (self._iteration, self._mini)
            )
            while self._iteration < self._algorithm.iterations:
                self._train_step(stream)
            self._publisher.drain()
            stream.close()
            self._context.log.info("%d iterations are trained", self._iteration)
        finally:
            self._publisher.close()

    def _restore(self) -> dict[int, int]:
        """The newest checkpoint, or the beginning."""
        found = self._checkpoints.latest()
        if found is None:
            self._root = root_digest(digests_of(self._learner.weights()))
            return {}
        manifest, state = found
        self._learner.restore(state)
        self._iteration, self._number, self._root = manifest.iteration, manifest.step, manifest.root
        self._ledger_end = manifest.ledger
        self._context.log.info("resumed at iteration %d from its checkpoint", manifest.iteration)
        return manifest.positions

    def _redo(self) -> None:
        """Take the ledger's steps behind the checkpoint again, exactly as recorded."""
        for record in steps_after(self._context, self._ledger_end):
            self._ledger_end += 1
            if record.step < self._number:
                continue  # of a trainer that was thought dead
            rows = fetch_rows(self._context, record)
            step = _Step()
            for bundle in _bundles_in(rows):
                planned = plan(
                    bundle, self._algorithm, self._spec.trainer.microbatch_tokens, record.version_in
                )
                self._accumulate(step, bundle[0].sample.bundle, planned)
            self._learner.step(self._normaliser(rows))
            self._root = root_digest(digests_of(self._learner.weights()))
            if self._root != record.root_out:
                self._adopt(record)
            self._advance(record.last_of_iteration)
            self._context.log.info("step %d taken again from the ledger", record.step)

    def _adopt(self, record: StepRecord) -> None:
        """This machine computes other bits than the one before: what was published is what counts."""
        published = self._publisher.find(record.version_out) if record.last_of_iteration else None
        self._context.log.warning(
            "step %d has other bits than the ledger says (another kind of machine?)%s",
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

    def _publish(self) -> None:
        """The weights between two iterations; after a partial one there is nothing new."""
        if self._mini == 0:
            self._publisher.publish(self._iteration, self._learner.weights())

    def _train_step(self, stream: SampleStream) -> None:
        """One optimizer step: whatever is complete is accumulated, until all is."""
        at_step(self._number)
        key = (self._iteration, self._mini)
        step = self._collect(stream, key)
        rows = [row for bundle in sorted(step.rows) for row in _plan_rows(step.rows[bundle][0])]
        began = time.monotonic()
        try:
            norm = self._learner.step(self._normaliser(rows))
        except NotFinite as error:
            raise self._failure(error, rows) from error
        step.compute_s += time.monotonic() - began
        last = self._mini + 1 == self._algorithm.optimizer_steps
        weights = self._learner.weights()
        self._root = root_digest(digests_of(weights))
        record = self._record(step, rows, norm, last)
        self._context.writer.send(self._context.topics.ledger, encode(record), key=str(record.step))
        self._context.writer.flush(self._spec.deadlines.progress_s)
        self._ledger_end += 1
        stream.trained(key)
        self._advance(last)
        self._report(record, stream)
        if last:
            self._publisher.publish(self._iteration, weights)
            self._checkpoint(stream)

    def _collect(self, stream: SampleStream, key: tuple[int, int]) -> _Step:
        step = _Step()
        groups = self._algorithm.groups // self._algorithm.optimizer_steps
        have = 0
        wait = Wait(f"samples of iteration {key[0]}", unblocked_by="the generators",
                    deadline_s=self._spec.deadlines.progress_s)  # fmt: skip
        while have < groups:
            self._context.check_stop()
            ready = [bundle for bundle in stream.complete(key) if bundle.number not in step.rows]
            if ready:
                bundle = ready[0]
                self._context.heart.working("training")
                planned = plan(
                    bundle.in_order(), self._algorithm, self._spec.trainer.microbatch_tokens, key[0]
                )
                self._accumulate(step, bundle.number, planned)
                have += bundle.groups
                stream.pump(0.0)
                wait.progress()
                continue
            self._context.heart.waiting(
                f"{stream.outstanding(key)} samples of iteration {key[0]}", unblocked_by="generators"
            )
            since = time.monotonic()
            wait.progress() if stream.pump(_POLL_S) else wait.check()
            step.waited_s += time.monotonic() - since
        return step

    def _accumulate(self, step: _Step, bundle: int, planned: Plan) -> None:
        began = time.monotonic()
        stats: list[LossStats] = []
        for batch in planned.batches:
            try:
                stats.append(self._learner.accumulate(batch))
            except NotFinite as error:
                raise self._failure(error, batch.rows) from error
        step.rows[bundle] = (planned, stats)
        step.compute_s += time.monotonic() - began

    def _failure(self, error: NotFinite, rows: Sequence[Row]) -> TrainingFailed:
        names = ", ".join(row.sample.id for row in rows[:8])
        return TrainingFailed(f"step {self._number}: {error}; samples {names}{' …' if len(rows) > 8 else ''}")

    def _normaliser(self, rows: Sequence[Row]) -> float:
        """Sum of all token weights of a step: of the samples without a gradient too."""
        lengths = [row.sample.true_length for row in rows if not row.sample.reward_error]
        if not lengths:
            raise TrainingFailed(f"step {self._number}: no sample has a reward; see the generators' logs")
        return float(sum(length * token_weight(length, self._algorithm) for length in lengths))

    def _record(self, step: _Step, rows: Sequence[Row], norm: float, last: bool) -> StepRecord:
        samples = [row.sample for row in rows]
        plans = [step.rows[bundle] for bundle in sorted(step.rows)]
        return StepRecord(
            run=self._context.run, trainer_epoch=self._epoch, iteration=self._iteration, step=self._number,
            last_of_iteration=last, version_in=self._iteration, recipe=self._recipe,
            version_out=self._iteration + 1 if last else self._iteration, root_out=self._root,
            partitions=np.array([row.partition for row in rows], dtype=np.int16),
            offsets=np.array([row.offset for row in rows], dtype=np.int64),
            groups=np.array([sample.group for sample in samples], dtype=np.int64),
            indexes=np.array([sample.index for sample in samples], dtype=np.int16),
            lengths=np.array([sample.true_length for sample in samples], dtype=np.int32),
            rewards=np.array(
                [np.nan if sample.reward_error else sample.reward for sample in samples], dtype=np.float32
            ),
            versions=np.array([sample.versions.min() for sample in samples], dtype=np.int32),
            seeds=np.array([sample.seed for sample in samples], dtype=np.uint64),
            predicted=np.array([sample.predicted for sample in samples], dtype=np.float32),
            problem_ids=[sample.problem_id for sample in samples],
            microbatches=np.array(
                [size for planned, _ in plans
                 for size in [*(len(b.rows) for b in planned.batches), len(planned.idle)]], dtype=np.int32,
            ),
            losses=np.array([stat.loss for _, stats in plans for stat in stats], dtype=np.float64),
            metrics=step_metrics(
                samples, [planned for planned, _ in plans], [stat for _, stats in plans for stat in stats],
                iteration=self._iteration, norm=norm, compute_s=step.compute_s, waited_s=step.waited_s,
            ),
            finished_at=time.time(),
        )  # fmt: skip

    def _report(self, record: StepRecord, stream: SampleStream) -> None:
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
        if not metrics["informative_groups"]:
            self._context.log.warning("in no group do rewards differ: this step learned nothing")
        self._context.log.info(
            "iteration %d reward %.3f, length %.1f, staleness %.2f, waited %.2f s, computed %.2f s",
            record.iteration, metrics["reward"], metrics["length"], metrics["staleness"],
            metrics["waited_s"], metrics["compute_s"],
        )  # fmt: skip

    def _checkpoint(self, stream: SampleStream) -> None:
        every = self._spec.trainer.checkpoint_every
        if self._iteration % every and self._iteration != self._algorithm.iterations:
            return
        state, positions = self._learner.state(), stream.low_watermarks()
        iteration, number, root, ledger = self._iteration, self._number, self._root, self._ledger_end
        self._publisher.submit(
            lambda: self._checkpoints.save(
                state, keep=self._spec.trainer.keep_checkpoints, iteration=iteration, step=number, root=root,
                positions=positions, ledger=ledger, recipe=self._recipe, trainer_epoch=self._epoch,
            )
        )  # fmt: skip


def _plan_rows(planned: Plan) -> list[Row]:
    """A bundle's rows in the order of the ledger: micro-batches, then those that need none."""
    return [row for batch in planned.batches for row in batch.rows] + list(planned.idle)


def _bundles_in(rows: Sequence[Row]) -> list[list[Row]]:
    """The ledger's rows of a step, bundle by bundle, each by group and index as it was first planned."""
    bundles: dict[int, list[Row]] = {}
    for row in rows:
        bundles.setdefault(row.sample.bundle, []).append(row)
    return [
        sorted(bundles[number], key=lambda row: (row.sample.group, row.sample.index))
        for number in sorted(bundles)
    ]


def body(context: Context) -> None:
    """What the trainer does."""
    learner = TorchLearner(context.record.model, context.spec)
    context.loaded()
    Trainer(context, learner).run()


if __name__ == "__main__":
    sys.exit(run_role("trainer", body))
