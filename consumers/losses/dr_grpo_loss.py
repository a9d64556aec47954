"""Dr. GRPO: GRPO without two biases: it divides by neither the group's deviation nor a sample's length."""

from __future__ import annotations

from consumers.losses.loss import ClippedLoss, ClippedSettings
from schemas.losses import Average, average
from schemas.runspec import RunSpec


class DrGrpoSettings(ClippedSettings):
    """Settings of dr_grpo."""

    average: Average = average("longest")

    def make(self, spec: RunSpec) -> DrGrpo:
        return DrGrpo(self, spec)


class DrGrpo(ClippedLoss):
    """The loss of "Understanding R1-Zero-like training", 2025."""

    settings: DrGrpoSettings
