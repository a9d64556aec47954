"""GRPO: the group's mean reward is the baseline, its deviation the unit; ratios are clipped per token."""

from __future__ import annotations

from consumers.losses.loss import ClippedLoss, ClippedSettings, GroupSettings
from schemas.losses import Average, average
from schemas.runspec import RunSpec


class GrpoSettings(GroupSettings, ClippedSettings):
    """Settings of grpo."""

    average: Average = average("sequence")

    def make(self, spec: RunSpec) -> Grpo:
        return Grpo(self, spec)


class Grpo(ClippedLoss):
    """The loss of DeepSeekMath, 2024."""

    settings: GrpoSettings
