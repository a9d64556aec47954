"""Trajectory balance (TBA): train the policy towards reference * exp(reward / temperature), from any samples.

    residual of a sample   log Z + log policy - log reference - reward / temperature
    log Z of a prompt      the mean over its group that makes the residuals' mean 0

The loss is the squared residual. Divided by 2 / temperature, its gradient is that of
- (reward - temperature * (log policy - log reference), centred in the group) * log policy.
This holds whichever weights drew the samples. So there are no ratios, and old samples are as good as new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow
from consumers.losses.loss import GroupLoss, Needs, Tokens


class TrajectoryBalance(GroupLoss):
    """The loss of trajectory balance with asynchrony, 2025; log Z is estimated as in VarGrad."""

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
        return self.reward(row) - float(self.settings.reward_temperature or 0.0) * farther

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return -tokens.advantage * tokens.logprobs
