"""Trajectory balance (TBA): train the policy towards reference * exp(reward / temperature), from any samples.

    residual of a sample   log Z + log policy - log reference - reward / temperature
    log Z of a prompt      the mean over its group that makes the residuals' mean 0

The loss is the squared residual. Divided by 2 / temperature, its gradient is that of
- (reward - temperature * (log policy - log reference), centred in the group) * log policy.
This holds whichever weights drew the samples. So there are no ratios, and old samples are as good as new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from consumers.batches.training_rows import TrainingRow
from consumers.losses.loss import GroupLoss, LossSettings, Needs, Tokens
from schemas.losses import Average, average
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch


class TrajectoryBalanceSettings(LossSettings):
    """Settings of tb."""

    average: Average = average("sample")
    reward_temperature: float = Field(
        0.05,
        gt=0,
        le=1e6,
        description="The policy that is sought is reference * exp(reward / reward_temperature). A "
        "higher value stays nearer to the reference.",
    )
    replay: float = Field(
        0.0,
        ge=0,
        le=64,
        description="Number of groups of earlier steps that are trained again for each new group.",
    )

    @model_validator(mode="after")
    def _balances(self) -> TrajectoryBalanceSettings:
        if self.correction != "none":
            raise ValueError("tb holds for samples of any weights, and needs no correction: set it to none")
        if self.kl and self.kl_in == "reward":
            raise ValueError("tb counts the divergence by reward_temperature already: set kl to 0")
        return self

    @property
    def always_needs_reference(self) -> bool:
        return True

    @property
    def holds_for_any_weights(self) -> bool:
        return True

    def make(self, spec: RunSpec) -> TrajectoryBalance:
        return TrajectoryBalance(self, spec)


class TrajectoryBalance(GroupLoss):
    """The loss of trajectory balance with asynchrony, 2025; log Z is estimated as in VarGrad."""

    settings: TrajectoryBalanceSettings

    @property
    def needs(self) -> Needs:
        return Needs(reference=True, before="step")

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([self._residual(row) for row in rows])
        return [np.array([value]) for value in self.centred(rows, rewards, scaled=False)]

    def _residual(self, row: TrainingRow) -> float:
        scores = row.scores
        assert scores.before is not None and scores.reference is not None
        farther = float((scores.before - scores.reference).sum())
        return self.reward(row) - float(self.settings.reward_temperature) * farther

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.advantage * tokens.logprobs
