"""Marks of a step's stages, by which a replay finds the first stage that differs, and by how much.

A digest says whether a stage has the same bits. The other numbers say by how much it differs, and in which
sample: means of each sample's tokens, and sketches of the large vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

from consumers.batches.micro_batches import MicroBatch
from consumers.batches.training_rows import TrainingRow
from consumers.losses.objective import LossStats, means_of
from consumers.steps.step_metrics import OptimizerUpdate
from schemas.stages import Stage

VECTORS = (Stage.GRADIENT, Stage.OPTIMIZER, Stage.WEIGHTS)  # that have a size and a sketch, in this order


@dataclass(frozen=True)
class StageMarks:
    """The marks of one step; each field is one of the ledger's record."""

    stages: np.ndarray
    advantages: np.ndarray
    scores: np.ndarray
    logprobs: np.ndarray
    gaps: np.ndarray
    sizes: np.ndarray
    sketches: np.ndarray

    def fields(self) -> dict[str, Any]:
        """Return the marks as fields of a record."""
        return dict(vars(self))


def stage_marks(
    rows: Sequence[TrainingRow], batches: Sequence[MicroBatch], stats: Sequence[LossStats],
    update: OptimizerUpdate, root: str,
) -> StageMarks:  # fmt: skip
    """Return the marks of a step. `rows` are in the ledger's order, `batches` in that of training."""
    places = {id(row): number for number, row in enumerate(rows)}
    advantages, scores, logprobs, gaps = (np.full(len(rows), np.nan, np.float32) for _ in range(4))
    for batch, stat in zip(batches, stats, strict=False):  # a step that failed has fewer stats
        mine = [places[id(row)] for row in batch.rows]
        advantages[mine] = means_of(batch.advantage.numpy(), batch)
        if known := _scores(batch):
            scores[mine] = sum(means_of(one.numpy(), batch) for one in known)
        logprobs[mine], gaps[mine] = stat.means, stat.gaps
    taken = update.taken
    vectors = (taken.gradient, taken.moments, taken.weights)
    found = {
        Stage.REWARD: _rewards(rows),
        Stage.ADVANTAGE: _digest(batch.advantage for batch in batches),
        Stage.SCORES: _digest(one for batch in batches for one in _scores(batch)),
        Stage.MICRO_BATCHES: _digest(one for batch in batches for one in _inputs(batch)),
        Stage.LOGPROBS: _digest([np.array([stat.digest for stat in stats], dtype=np.uint64)]),
        Stage.LOSS: _digest([np.array([stat.loss for stat in stats])]),
        Stage.GRADIENT: taken.gradient.digest,
        Stage.NORM: _digest([np.array([taken.norm])]),
        Stage.OPTIMIZER: taken.moments.digest,
        Stage.WEIGHTS: xxh3_64(f"{root} {taken.weights.digest}".encode()).intdigest(),
    }
    return StageMarks(
        np.array([found[stage] for stage in Stage], dtype=np.uint64), advantages, scores, logprobs, gaps,
        np.array([one.size for one in vectors]),
        np.concatenate([one.sketch for one in vectors]).astype(np.float32),
    )  # fmt: skip


def _scores(batch: MicroBatch) -> list[torch.Tensor]:
    return [one for one in (batch.reference, batch.before, batch.values) if one is not None]


def _inputs(batch: MicroBatch) -> Iterable[torch.Tensor | np.ndarray]:
    """Return all that the model and the loss get of a micro-batch, but advantages and scores."""
    tokens = batch.tokens[: batch.packing.tokens]  # filling differs from one kind of CPU to another
    routes = [np.frombuffer(one, np.uint8) for one in batch.routes if one]
    return tokens, batch.answer, batch.owner, batch.weight, batch.fresh, batch.behaviour, *routes


def _rewards(rows: Sequence[TrainingRow]) -> int:
    said = [np.nan if row.sample.reward_error else row.sample.reward for row in rows]
    return _digest([np.array(said)])


def _digest(parts: Iterable[torch.Tensor | np.ndarray]) -> int:
    """Return a digest of the bits of these parts; 0 only if there are none."""
    hashed, any_ = xxh3_64(), False
    for part in parts:
        raw = part.numpy() if isinstance(part, torch.Tensor) else part
        hashed.update(np.ascontiguousarray(raw).data)
        any_ = True
    return hashed.intdigest() or 1 if any_ else 0
