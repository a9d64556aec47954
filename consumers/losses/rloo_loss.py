"""RLOO: REINFORCE; the baseline of a sample is the mean reward of the other samples of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import model_validator

from consumers.batches.training_rows import TrainingRow, groups_of
from consumers.losses.loss import GroupLoss, LossSettings, Tokens
from schemas.algorithm import AlgorithmSection, SamplingSection
from schemas.losses import Average, average
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch


class RlooSettings(LossSettings):
    """Settings of rloo."""

    average: Average = average("sample")

    @model_validator(mode="after")
    def _corrects(self) -> RlooSettings:
        if self.correction == "decoupled":
            raise ValueError("rloo has no ratio to an iteration's first weights: set correction to truncated")
        return self

    @property
    def has_ratios(self) -> bool:
        return False

    def check_run(self, algorithm: AlgorithmSection, sampling: SamplingSection) -> None:
        of_others = algorithm.mode != "sync" or algorithm.optimizer_steps > 1
        if of_others and self.correction == "none":
            raise ValueError(
                "rloo without a correction takes each sample as drawn by the weights that are trained: with "
                "algorithm.mode async or offline, or several optimizer_steps, set loss.correction to "
                "truncated"
            )

    def make(self, spec: RunSpec) -> Rloo:
        return Rloo(self, spec)


class Rloo(GroupLoss):
    """The loss of "Back to basics", 2024."""

    settings: RlooSettings

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        over = self.centred(rows, rewards, scaled=False)
        for members in map(np.array, groups_of(rows)):
            known = int((~np.isnan(rewards[members])).sum())
            if known > 1:  # r - mean of the others = (r - mean of all) * n / (n - 1)
                over[members] *= known / (known - 1)
        return [np.array([value]) for value in over]

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.advantage * tokens.logprobs
