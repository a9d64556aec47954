"""Times a learner at the trainer's work: bundles of given samples, optimizer steps, versions of the weights.

records ──► rows ──► scores, micro-batches, forward and backward ──► step ──► hash ──► record
                          └─ again, in other bundles                   └─► copy ──► store
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from consumers.batches.micro_batches import plan
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import Learner
from consumers.steps.redo import update
from consumers.steps.scoring import Scoring
from consumers.steps.step_record import StepParts, recipe_of, step_record
from infra.core_waits import WorkWatch
from infra.stores.store import Store
from infra.weights.folder import ModelFolder
from infra.weights.inspection import inspected
from infra.weights.versions import WeightStore
from schemas.messages import Sample
from schemas.runspec import RunSpec
from schemas.wire import decode, encode


class CallTable(msgspec.Struct, kw_only=True):
    """Calls of the learner: an entry in each list for each call."""

    samples: list[int] = []  # with a gradient
    tokens: list[int] = []
    context: list[int] = []  # tokens that those attend to, all together
    micro_batches: list[int] = []
    seconds: list[float] = []  # without waits for a core
    busy_cores: float = 0.0
    disturbed: float = 0.0


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an optimizer step, and of what is done before its record may be written."""

    step_s: float
    hash_s: float
    record_s: float
    samples: int
    root: str


class VersionPut(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the weights that was put into the store."""

    version: int
    root: str
    seconds: float
    whole_bytes: int
    delta_bytes: int  # to fetch after the version before


class TimedTraining:
    """A learner with the samples that it is timed with."""

    def __init__(self, spec: RunSpec, model: str, learner: Learner) -> None:
        self._spec, self._model, self._learner = spec, model, learner
        self._scoring = Scoring(learner, learner.loss.needs, at_once=spec.trainer.ranks)
        self._rows: list[TrainingRow] = []
        self._parts = StepParts(0, 0)
        self._recipe = recipe_of(spec)
        self._weights: WeightStore | None = None

    def take(self, records: Sequence[bytes]) -> float:
        """Take samples in place of those before. Return the seconds of reading one."""
        watch = WorkWatch()
        self._rows = [TrainingRow(decode(raw, Sample), 0, number) for number, raw in enumerate(records)]
        return watch.end().seconds / max(1, len(records))

    def train(self, bundles: Sequence[Sequence[int]]) -> CallTable:
        """Train bundles, each a list of numbers of samples, and time each as the trainer has it done."""
        table, watch = CallTable(), WorkWatch()
        self._learner.begin_iteration()
        for bundle in bundles:
            self._scoring.begin()
            rows = [self._rows[number] for number in bundle]
            watch.begin()
            scored = self._scoring.scored(rows)
            trainer = self._spec.trainer
            planned = plan(scored, self._learner.loss, trainer.microbatch_tokens, 0, parts=trainer.parts)
            stats = self._learner.accumulate(planned.batches)
            took = watch.end()
            self._parts.plans.append(planned)
            self._parts.stats += stats
            trained = [row for batch in planned.batches for row in batch.rows]
            if not trained:
                continue
            sizes = np.array([row.size for row in trained], dtype=np.int64)
            table.samples.append(len(trained))
            table.tokens.append(int(sizes.sum()))
            table.context.append(int((sizes * sizes).sum() // 2))
            table.micro_batches.append(len(planned.batches))
            table.seconds.append(took.seconds)
        table.busy_cores, table.disturbed = watch.busy_cores, watch.disturbed
        return table

    def step(self) -> StepSeconds:
        """Take an optimizer step over all that was trained since the last one."""
        parts, self._parts = self._parts, StepParts(0, 0)
        watch = WorkWatch()
        done = update(self._learner, parts.rows, 0, any_gradient=parts.any_gradient)
        step = watch.end()
        watch.begin()
        self._made = self._learner.made()
        hashed = watch.end()
        watch.begin()
        record = step_record(
            parts, run="profile-1", trainer_epoch=1, recipe=self._recipe, dtype=self._spec.model.dtype,
            last=True, root=self._made.root, update=done,
        )  # fmt: skip
        encode(record)
        written = watch.end()
        return StepSeconds(
            step_s=step.seconds,
            hash_s=hashed.seconds,
            record_s=written.seconds,
            samples=len(parts.rows),
            root=self._made.root,
        )

    def root(self) -> str:
        """Return the root of the weights as they are."""
        self._made = self._learner.made()
        return self._made.root

    def put(self, store: Store, prefix: str, version: int) -> VersionPut:
        """Put the weights into a store as the publisher does. `root` or `step` comes before it."""
        if self._weights is None:
            self._weights = WeightStore(store, "profile-1", prefix=prefix)
        base = self._learner.base
        watch = WorkWatch()
        tensors = self._made.copy().result()
        manifest = self._weights.publish(
            version, tensors, trainer_epoch=1, base=base,
            files=ModelFolder(self._model).beside if base is None else {}, known=inspected(tensors),
        )  # fmt: skip
        seconds = watch.end().seconds
        way = manifest.path(version - 1) or manifest.path(None)
        return VersionPut(
            version=version,
            root=manifest.root,
            seconds=seconds,
            whole_bytes=manifest.size,
            delta_bytes=way.size if way else 0,
        )

    def snapshot(self) -> float:
        """Return the seconds for which a checkpoint holds training up."""
        watch = WorkWatch()
        taken = self._learner.snapshot()
        found = watch.end().seconds
        taken.abandon()
        return found
