"""An optimizer step while it is collected, and its record in the ledger."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

import numpy as np
from pydantic_core import to_json

from consumers.batches.micro_batches import MicroBatchPlan
from consumers.batches.training_rows import TrainingRow
from consumers.losses.objective import LossStats
from consumers.steps.failed_rewards import example_of
from consumers.steps.stage_marks import stage_marks
from consumers.steps.step_metrics import OptimizerUpdate, step_metrics
from infra.machine_kind import kind_of_machine
from schemas.algorithm import AlgorithmSection, SamplingSection
from schemas.identity import digest_of_seeds
from schemas.losses import LossSection
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from schemas.stages import tolerances

# The settings of all losses at the time when ledgers began, in their order. A new one stands behind them.
_SETTINGS_OF_LOSSES = (
    "kind", "advantage", "average", "clip_low", "clip_high", "overlong_tokens", "overlong_penalty",
    "resample", "discount", "gae_lambda", "value_clip", "value_learning_rate", "whiten", "reward_temperature",
    "replay", "kl", "kl_in", "kl_estimator", "reference", "correction", "correction_cap", "correct_fresh",
)  # fmt: skip


@dataclass
class StepParts:
    """The parts of an optimizer step, which grow until the step is taken."""

    iteration: int
    number: int
    taken: set[int] = field(default_factory=set)  # numbers of bundles
    replayed: int = 0  # rows, which come first
    groups: int = 0  # groups that are final: none will be drawn in their place
    plans: list[MicroBatchPlan] = field(default_factory=list)  # in the order of accumulation
    stats: list[LossStats] = field(default_factory=list)
    compute_s: float = 0.0
    waited_s: float = 0.0

    @property
    def any_gradient(self) -> bool:
        """Whether any sample has a gradient."""
        return any(planned.batches for planned in self.plans)

    @property
    def rows(self) -> list[TrainingRow]:
        """All rows in the ledger's order: for each plan those of its micro-batches, then its idle rows."""
        return [
            row
            for planned in self.plans
            for part in (*(batch.rows for batch in planned.batches), planned.idle)
            for row in part
        ]


def recipe_of(spec: RunSpec) -> str:
    """Hash the settings that a step's bits depend on, but the micro-batch sizes, which its record has."""
    trainer = spec.trainer
    sums = trainer.exact_recipe if trainer.sums_exactly else trainer.rank_sums
    settings = [
        _algorithm_settings(spec.algorithm), _loss_settings(spec.loss),
        _sampling_settings(spec.sampling), spec.model.dtype, trainer.logits_chunk, trainer.threads, sums,
    ]  # fmt: skip
    if spec.model.lora is not None:
        settings.append(spec.model.lora.model_dump_json())
    return hashlib.blake2b(repr(settings).encode(), digest_size=8).hexdigest()


def _algorithm_settings(algorithm: AlgorithmSection) -> str:
    """Write the settings of the algorithm that a step depends on; those of order window as always."""
    lately = {"order", "staleness_cap"} if algorithm.order == "window" else set[str]()
    return algorithm.model_copy(update={"iterations": 1}).model_dump_json(exclude=lately)


def _sampling_settings(sampling: SamplingSection) -> str:
    """Write the settings of sampling that a step depends on, as ledgers have always had them."""
    said = sampling.model_dump_json(include={"temperature", "max_tokens", "max_prompt_tokens"})
    return f"{said} min_tokens {sampling.min_tokens}" if sampling.min_tokens else said


def _loss_settings(loss: LossSection) -> str:
    """Write a loss's settings as ledgers have always had them: with null for those of other losses."""
    said = loss.model_dump(mode="json", exclude_none=True)
    return to_json(dict.fromkeys(_SETTINGS_OF_LOSSES) | said).decode()  # pydantic's own: 1e-5 is 0.00001


def step_record(
    step: StepParts,
    *,
    run: str,
    trainer_epoch: int,
    recipe: str,
    dtype: str,
    last: bool,
    root: str,
    update: OptimizerUpdate,
) -> StepRecord:
    """Return the ledger's record of a step."""
    rows = step.rows
    batches = [batch for planned in step.plans for batch in planned.batches]
    marks = stage_marks(rows, batches, step.stats, update, root)
    samples = [row.sample for row in rows]
    reason, example = example_of(samples)
    return StepRecord(
        run=run, trainer_epoch=trainer_epoch, iteration=step.iteration, step=step.number,
        last_of_iteration=last, version_in=step.iteration, recipe=recipe,
        version_out=step.iteration + 1 if last else step.iteration, root_out=root,
        partitions=np.array([row.partition for row in rows], dtype=np.int16),
        offsets=np.array([row.offset for row in rows], dtype=np.int64),
        groups=np.array([sample.group for sample in samples], dtype=np.int64),
        indexes=np.array([sample.index for sample in samples], dtype=np.int16),
        lengths=np.array([sample.true_length for sample in samples], dtype=np.int32),
        rewards=np.array([np.nan if s.reward_error else s.reward for s in samples], dtype=np.float32),
        versions=np.array([sample.versions.min() for sample in samples], dtype=np.int32),
        seeds_digest=digest_of_seeds(sample.seed for sample in samples),
        predicted=np.array([sample.predicted for sample in samples], dtype=np.float32),
        problem_ids=[sample.problem_id for sample in samples],
        microbatches=np.array(
            [size for planned in step.plans
             for size in [*(len(b.rows) for b in planned.batches), len(planned.idle)]], dtype=np.int32,
        ),
        losses=np.array([stat.loss for stat in step.stats], dtype=np.float64),
        metrics=step_metrics(
            samples, step.plans, step.stats, iteration=step.iteration, update=update,
            compute_s=step.compute_s, waited_s=step.waited_s,
        ),
        replayed=step.replayed, finished_at=time.time(), failed_reason=reason, failed_sample=example,
        made_on=kind_of_machine(), tolerances=np.array(tolerances(dtype)), **marks.fields(),
    )  # fmt: skip
