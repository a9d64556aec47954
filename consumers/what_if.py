"""Train a run's recorded samples again with other settings, from one step on, beside what the run came to.

state before step N ─┬─► steps N, N+1, … with the run's settings ────► curve of the run (the recorded bits?)
                     ├─► the same samples with other settings ───────► curve, effective sample sizes
                     └─► and with others again ─────────────────────► …

As long as the samples of a step were drawn by weights that a run with the other settings would have had, too,
its step is that run's step, to the bit. From then on they were drawn by other weights: the loss corrects for
that, and the effective sample size says how far the samples still tell something. Nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from consumers.batches.cutting import cut
from consumers.batches.micro_batches import MicroBatchPlan, plan
from consumers.batches.reweighting import Reweighted, reweighted
from consumers.batches.training_rows import TrainingRow
from consumers.learners.fingerprint import Fingerprint, distance
from consumers.learners.learner import Learner
from consumers.learners.optimizing import NotFinite
from consumers.losses.loss import Needs
from consumers.losses.objective import LossStats
from consumers.replay import Again
from consumers.steps.failing import TrainingFailed
from consumers.steps.redo import RedoneStep, update, version_trained
from consumers.steps.scoring import Scoring
from consumers.steps.step_metrics import OptimizerUpdate, step_metrics
from schemas.messages import StepRecord
from schemas.runspec import RunSpec

RECORDED = "recorded"  # name of the run's own curve
CURVES = ("loss", "grad_norm", "entropy", "clip_fraction", "divergence", "logprob_drift")

WhatIfProgress = Callable[[str, int, int], None]  # curve, steps taken of it, of how many


@dataclass(frozen=True)
class Variant:
    """A run's settings with some changes."""

    name: str
    spec: RunSpec


@dataclass(frozen=True)
class CurvePoint:
    """One step of a curve. `samples` is about the weights that the step begins with."""

    step: int
    iteration: int
    metrics: Mapping[str, float]  # those of CURVES that are known
    samples: Reweighted
    corrected: bool  # whether the samples were drawn by weights that this curve never had
    root: str
    weights_apart: float | None  # distance of the weights from the recorded ones, about; None: not known
    equal: bool | None = None  # the run's own curve: whether the step came to the recorded bits ...
    as_expected: bool | None = None  # ... or may differ here, and does so within the record's tolerances


@dataclass
class WhatIfCurve:
    """The steps of one variant."""

    name: str
    correction: str  # by which samples of other weights were corrected, for people
    points: list[CurvePoint] = field(default_factory=list)
    ended: str = ""  # why it ends before the others; empty: it does not

    @property
    def believable_until(self) -> int | None:
        """The last step up to which all steps can be believed; None: not even the first."""
        last = None
        for point in self.points:
            if not point.samples.believable:
                break
            last = point.step
        return last


@dataclass(frozen=True)
class _PlanShape:
    """Rows that were cut into micro-batches together."""

    rows: slice  # in the record's order
    sizes: Sequence[int]  # of its micro-batches


@dataclass(frozen=True)
class _RecordedStep:
    record: StepRecord
    shapes: Sequence[_PlanShape]
    newest: int  # the newest version that drew one of its tokens
    weights: Fingerprint | None
    root: str


class WhatIf:
    """Takes recorded steps of one run with its own and with other settings."""

    def __init__(
        self, again: Again, spec: RunSpec, learner_of: Callable[[RunSpec], Learner], progress: WhatIfProgress
    ) -> None:
        self._again, self._spec, self._learner_of, self._progress = again, spec, learner_of, progress

    def curves(self, first: int, last: int, variants: Sequence[Variant]) -> Iterator[WhatIfCurve]:
        """Yield the run's own curve over some steps, and then that of each variant.

        Only one learner at a time is in memory: `again` can't be used any more.
        """
        for variant in variants:
            self._check(first, variant)
        state, steps, curve = self._recorded(first, last)
        self._again.close()
        yield curve
        for variant in variants:
            yield _Course(variant, self._spec, self._again, self._learner_of, steps).taken(
                state,
                lambda done, name=variant.name: self._progress(name, done, len(steps)),  # type: ignore[misc]
            )

    def _check(self, first: int, variant: Variant) -> None:
        """Raise TrainingFailed if a variant can't begin at this step."""
        steps = self._spec.algorithm.optimizer_steps
        iteration, mini = divmod(first, steps)
        if mini and variant.spec.loss.anchors_at_start:
            raise TrainingFailed(
                f"step {first} is inside iteration {iteration}, and ratios are taken to the weights that an "
                f"iteration begins with (loss.correction): begin at step {iteration * steps} or "
                f"{(iteration + 1) * steps}"
            )

    def _recorded(
        self, first: int, last: int
    ) -> tuple[dict[str, torch.Tensor], list[_RecordedStep], WhatIfCurve]:
        curve, steps = WhatIfCurve(RECORDED, self._spec.loss.correction), list[_RecordedStep]()
        state: dict[str, torch.Tensor] = {}
        weights: Fingerprint | None = None
        for record in self._again.reach(first, last):
            learner = self._again.learner
            state = state or learner.state()
            rows = self._again.rows(record)
            samples = _seen(learner, rows, self._spec, _own(rows, self._spec, record))
            taken = self._again.take(record)
            weights = _weights_of(taken.update, weights)
            versions = [int(row.sample.versions.max()) for row in rows]
            steps.append(
                _RecordedStep(record, _shapes(record, taken), max(versions, default=-1), weights, taken.root)
            )
            found = self._again.replayed(record, taken, "")
            plans = [MicroBatchPlan(list(taken.batches), [])]
            metrics = _metrics(taken.rows, plans, taken.stats, record, taken.update)
            curve.points.append(
                CurvePoint(
                    record.step, record.iteration, metrics, samples, False, taken.root,
                    0.0 if weights else None, found.equal, found.as_expected,
                )
            )  # fmt: skip
            self._progress(RECORDED, len(steps), last - first + 1)
        return state, steps, curve


class _Course:
    """The course of one variant over recorded steps."""

    def __init__(
        self, variant: Variant, recorded: RunSpec, again: Again, learner_of: Callable[[RunSpec], Learner],
        steps: Sequence[_RecordedStep],
    ) -> None:  # fmt: skip
        """`recorded`: the run's own settings."""
        cuts = [(one.trainer.microbatch_tokens, one.trainer.parts) for one in (recorded, variant.spec)]
        self._same_cut = cuts[0] == cuts[1]
        self._again, self._learner_of, self._steps = again, learner_of, steps
        self._spec, self._corrects = variant.spec, False
        self._offline = variant.spec.algorithm.mode == "offline"
        self._corrected_spec, words = corrected(variant.spec)
        self._curve = WhatIfCurve(variant.name, words)
        # From this version on, a run with these settings has other weights than the record.
        self._differs = steps[0].record.iteration + 1
        self._same = True  # whether the weights have been the recorded ones until now
        self._weights: Fingerprint | None = None

    def taken(self, state: Mapping[str, torch.Tensor], progress: Callable[[int], None]) -> WhatIfCurve:
        """Take all steps, up to the first that can't be taken."""
        self._begin(self._spec, state)
        try:
            for number, step in enumerate(self._steps):
                try:
                    self._curve.points.append(self._take(step))
                except (NotFinite, TrainingFailed) as error:
                    self._curve.ended = f"step {step.record.step} can't be taken: {error}"
                    break
                progress(number + 1)
        finally:
            self._learner.close()
        return self._curve

    def _begin(self, spec: RunSpec, state: Mapping[str, torch.Tensor]) -> None:
        self._learner = self._learner_of(spec)
        self._learner.restore(state)
        self._scoring = Scoring(self._learner, self._learner.loss.needs, at_once=spec.trainer.ranks)

    def _take(self, step: _RecordedStep) -> CurvePoint:
        record = step.record
        if record.step % self._spec.algorithm.optimizer_steps == 0:
            self._begin_iteration(record.iteration)
        learner, trainer = self._learner, self._spec.trainer
        self._scoring.begin()
        rows = self._again.rows(record)
        own = [False] * len(rows) if self._corrects else _own(rows, self._spec, record)
        samples = _seen(learner, rows, self._spec, own)
        rows = self._scoring.scored(rows)
        version = -1 if self._corrects else version_trained(self._spec, record.step)
        shapes = [_PlanShape(slice(0, len(rows)), [])] if learner.loss.whole_step else step.shapes
        plans = [
            plan(rows[shape.rows], learner.loss, trainer.microbatch_tokens, version, parts=trainer.parts,
                 sizes=shape.sizes if self._same_cut else ())
            for shape in shapes
        ]  # fmt: skip
        stats = [stat for one in plans for stat in learner.accumulate(one.batches)]
        done = update(learner, rows, record.step, any_gradient=any(one.batches for one in plans))
        made = learner.made()
        if made.found.wrong:
            raise NotFinite(f"the optimizer step left NaN or infinity in {made.found.wrong}")
        self._weights = _weights_of(done, self._weights)
        self._same &= made.root == step.root
        if self._same and record.last_of_iteration:
            self._differs = record.iteration + 2
        return CurvePoint(
            record.step, record.iteration, _metrics(rows, plans, stats, record, done), samples,
            self._corrects, made.root, _apart(self._weights, step.weights) if made.root != step.root else 0.0,
        )  # fmt: skip

    def _begin_iteration(self, iteration: int) -> None:
        """Begin an iteration; from the first one on with samples of other weights, correct for them."""
        newest = max((one.newest for one in self._steps if one.record.iteration == iteration), default=-1)
        if not self._corrects and not self._offline and newest >= self._differs:
            self._corrects = True
            if self._corrected_spec is not self._spec:
                state = self._learner.state()
                self._learner.close()
                self._begin(self._corrected_spec, state)
        self._learner.begin_iteration()


def corrected(spec: RunSpec) -> tuple[RunSpec, str]:
    """Return a spec whose loss corrects for samples of other weights, and the correction for people."""
    loss = spec.loss
    if spec.algorithm.mode == "offline":
        return spec, "none: an offline run's samples are the same whatever the weights are"
    if loss.holds_for_any_weights:
        return spec, f"none: {loss.kind} holds for samples of any weights"
    if loss.correction != "none":
        return spec, f"{loss.correction}, the loss's own, capped at {loss.correction_cap:g}"
    kind = "decoupled" if loss.has_ratios else "truncated"
    found = spec.model_copy(update={"loss": loss.model_copy(update={"correction": kind})})
    return found, f"{kind}, capped at {loss.correction_cap:g}, which the run's loss does not have"


def _own(rows: Sequence[TrainingRow], spec: RunSpec, record: StepRecord) -> list[bool]:
    """Return for each sample whether the weights drew it that the step begins with."""
    iteration, mini = divmod(record.step, spec.algorithm.optimizer_steps)
    if mini or spec.algorithm.mode == "offline":
        return [False] * len(rows)
    return [bool((row.sample.versions == iteration).all()) for row in rows]


def _seen(learner: Learner, rows: Sequence[TrainingRow], spec: RunSpec, own: Sequence[bool]) -> Reweighted:
    """Weight a step's samples by the weights that the learner has now."""
    order = sorted(range(len(rows)), key=lambda n: (rows[n].size, rows[n].sample.group, rows[n].sample.index))
    order = [number for number in order if not own[number]]
    parts, start = [], 0
    for size in cut([rows[number].size for number in order], spec.trainer.microbatch_tokens, 1):
        parts.append([rows[number] for number in order[start : start + size]])
        start += size
    found = learner.score(parts, Needs(before="step")) if parts else []
    logprobs = [row.sample.logprobs for row in rows]
    for number, row in zip(order, (row for part in found for row in part), strict=True):
        assert row.scores.before is not None
        logprobs[number] = row.scores.before
    return reweighted(rows, logprobs, own)


def _metrics(
    rows: Sequence[TrainingRow], plans: Sequence[MicroBatchPlan], stats: Sequence[LossStats],
    record: StepRecord, done: OptimizerUpdate,
) -> dict[str, float]:  # fmt: skip
    found = step_metrics(
        [row.sample for row in rows], plans, stats, iteration=record.iteration, update=done, compute_s=0.0,
        waited_s=0.0,
    )  # fmt: skip
    return {name: found[name] for name in CURVES if name in found}


def _shapes(record: StepRecord, taken: RedoneStep) -> list[_PlanShape]:
    """Return the rows that the record's step cut into micro-batches together."""
    trained = {id(row) for batch in taken.batches for row in batch.rows}
    found, start, end, sizes = [], 0, 0, list[int]()
    for size in record.microbatches.tolist():
        end += size
        if size and id(taken.rows[end - 1]) in trained:
            sizes.append(size)
            continue
        found.append(_PlanShape(slice(start, end), sizes))  # the idle rows end a plan
        start, sizes = end, []
    if end > start:
        found.append(_PlanShape(slice(start, end), sizes))
    return found


def _weights_of(done: OptimizerUpdate, before: Fingerprint | None) -> Fingerprint | None:
    """Return the weights' fingerprint after a step; without a gradient the weights stay as they were."""
    return done.taken.weights if done.taken.weights.digest else before


def _apart(ours: Fingerprint | None, theirs: Fingerprint | None) -> float | None:
    if ours is None or theirs is None:
        return None
    found = distance(np.array(ours.sketch), np.array(theirs.sketch))
    return found if math.isfinite(found) else None
