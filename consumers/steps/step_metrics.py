"""Metrics of a step: the ledger carries them, the live view and the report show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consumers.batches.micro_batches import MicroBatchPlan
from consumers.learners.optimizing import Stepped
from consumers.learners.peak_memory import peak_memory_gib
from consumers.losses.objective import LossStats
from schemas.identity import round_of
from schemas.messages import Sample
from schemas.metrics import REWARD_PART

_MOST_PARTS = 32  # parts of a reward that have a metric: a task may name parts by its problems


@dataclass(frozen=True)
class OptimizerUpdate:
    """One update of the weights: the step that the learner took, its divisor, and the learning rate."""

    taken: Stepped
    total: float = 0.0
    learning_rate: float = 0.0

    @property
    def norm(self) -> float:
        """The gradient's norm before clipping."""
        return self.taken.norm


def step_metrics(
    samples: Sequence[Sample], plans: Sequence[MicroBatchPlan], stats: Sequence[LossStats], *,
    iteration: int, update: OptimizerUpdate, compute_s: float, waited_s: float,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics of one optimizer step. One that nobody can know is left out."""
    rewards = np.array([np.nan if sample.reward_error else sample.reward for sample in samples])
    lengths = np.array([sample.true_length for sample in samples])
    staleness = np.array([iteration - int(sample.versions.min()) for sample in samples])
    batches = [batch for planned in plans for batch in planned.batches]
    held, padded = sum(b.packing.tokens for b in batches), sum(b.packing.places for b in batches)
    tokens = sum(stat.tokens for stat in stats)
    informative = {row.sample.group for batch in batches for row in batch.rows}
    predicted = np.array([sample.predicted for sample in samples])
    return {
        "reward": float(np.nanmean(rewards)) if not np.isnan(rewards).all() else 0.0,
        "failed_rewards": float(np.isnan(rewards).sum()),
        "length": float(lengths.mean()),
        "longest": float(lengths.max()),
        "cut_off": float(np.mean([sample.finish == "length" for sample in samples])),
        "length_error": float(np.median(np.abs(np.log(predicted / np.maximum(1, lengths))))),
        "tokens": float(lengths.sum()),
        "trained_tokens": float(tokens),
        "informative_groups": float(len(informative)),
        "resampled_groups": float(len({s.group for s in samples if round_of(s.group)})),
        "microbatches": float(len(batches)),
        "skipped": float(not batches),  # no gradient at all: the weights were left as they are
        "padding_waste": 1.0 - held / max(1, padded) if batches else 0.0,  # of attention's grid
        "row_filling": 1.0 - held / sum(b.tokens.numel() for b in batches) if batches else 0.0,
        "staleness": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "loss": sum(stat.loss for stat in stats) / (update.total or 1.0),
        "learning_rate": update.learning_rate,
        "grad_norm": update.norm,
        "clip_fraction": sum(stat.clipped for stat in stats) / max(1, tokens),
        "negative_logprob": sum(stat.negative_logprob for stat in stats) / max(1, tokens),
        "capped_fraction": sum(stat.capped for stat in stats) / max(1, tokens),
        "divergence": sum(stat.divergence for stat in stats) / max(1, tokens),
        "logprob_gap": max((stat.gap for stat in stats), default=0.0),
        "gap_tokens": float(sum(stat.gap_tokens for stat in stats)),
        "logprob_drift": sum(stat.drift for stat in stats) / max(1, tokens),
        **_of_policy(stats),
        **_of_critic(stats),
        **_by_class(samples),
        **_by_part(samples),
        "compute_s": compute_s,
        "waited_s": waited_s,
        "peak_memory_gib": peak_memory_gib(),
        "latency_s": float(np.mean([sample.finished_at - sample.started_at for sample in samples])),
    }


def _of_policy(stats: Sequence[LossStats]) -> dict[str, float]:
    """Return the entropy; empty where no token went through the model, as no group has a gradient."""
    looked_at = sum(stat.entropy_tokens for stat in stats)
    return {"entropy": sum(stat.entropy for stat in stats) / looked_at} if looked_at else {}


def _of_critic(stats: Sequence[LossStats]) -> dict[str, float]:
    """Return the share of the returns that the critic explains: 1 all, 0 no more than a constant 0 would."""
    returns = sum(stat.returns for stat in stats)
    if not returns:
        return {}
    return {"value_explained": 1.0 - sum(stat.value_error for stat in stats) / returns}


def _by_class(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the number of tokens of each predicted length class."""
    found: dict[str, float] = {}
    for sample in samples:
        name = f"tokens_class_{sample.length_class}"
        found[name] = found.get(name, 0.0) + sample.true_length
    return found


def _by_part(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of each part of the rewards, over the samples that have it."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            if not sample.reward_error and (name in found or len(found) < _MOST_PARTS):
                found.setdefault(name, []).append(value)
    return {f"{REWARD_PART}{name[:64]}": float(np.mean(values)) for name, values in found.items()}
