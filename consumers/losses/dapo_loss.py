"""DAPO: all tokens of a step count alike, the upper clip is wider, and answers that get too long lose reward.

reward lost   0 ──────────┐
                           ╲
                            ╲
-overlong_penalty            ╲
                          │   │
       max_tokens - overlong  max_tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from consumers.batches.training_rows import TrainingRow, says_nothing
from consumers.losses.loss import ClippedLoss, ClippedSettings
from schemas.algorithm import AlgorithmSection, SamplingSection
from schemas.losses import clip_high
from schemas.messages import Sample
from schemas.runspec import RunSpec


class DapoSettings(ClippedSettings):
    """Settings of dapo."""

    clip_high: float = clip_high(0.28)
    overlong_tokens: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="Number of tokens before sampling.max_tokens over which an answer loses reward. 0: none.",
    )
    overlong_penalty: float = Field(
        1.0, gt=0, le=1e6, description="The reward that an answer of sampling.max_tokens loses."
    )
    resample: int = Field(
        0,
        ge=0,
        le=64,
        description="Number of times that another problem may be drawn in the place of a group whose "
        "rewards are all alike. Groups that told nothing then do not count in the average. 0: "
        "none is drawn, and they count.",
    )

    def check_run(self, algorithm: AlgorithmSection, sampling: SamplingSection) -> None:
        if self.overlong_tokens >= sampling.max_tokens:
            raise ValueError(
                f"loss.overlong_tokens ({self.overlong_tokens}) must be less than sampling.max_tokens "
                f"({sampling.max_tokens}), or every answer would lose reward"
            )

    def make(self, spec: RunSpec) -> Dapo:
        return Dapo(self, spec)


class Dapo(ClippedLoss):
    """The loss of DAPO, 2025."""

    settings: DapoSettings

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        return [np.array([value]) for value in self.centred(rows, rewards, scaled=True)]

    def left_out(self, samples: Sequence[Sample]) -> set[int]:
        groups: dict[int, list[Sample]] = {}
        for sample in samples if self.settings.resample else ():
            groups.setdefault(sample.group, []).append(sample)
        return {group for group, members in groups.items() if says_nothing(members)}

    def reward(self, row: TrainingRow) -> float:
        zone = self.settings.overlong_tokens
        over = row.sample.true_length - (self._longest - zone)
        lost = self.settings.overlong_penalty * over / zone if zone and over > 0 else 0.0
        return super().reward(row) - lost
