"""For a loss of your own: see docs/extending/loss.md."""

from __future__ import annotations

from consumers.batches.training_rows import TrainingRow
from consumers.losses.loss import (
    ClippedLoss,
    ClippedSettings,
    CriticSettings,
    GroupLoss,
    GroupSettings,
    Loss,
    LossSettings,
    Needs,
    Tokens,
)
from schemas.runspec import RunSpec

__all__ = [
    "ClippedLoss",
    "ClippedSettings",
    "CriticSettings",
    "GroupLoss",
    "GroupSettings",
    "Loss",
    "LossSettings",
    "Needs",
    "RunSpec",
    "Tokens",
    "TrainingRow",
]
