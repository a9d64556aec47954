"""RLOO: REINFORCE; the baseline of a sample is the mean reward of the other samples of its group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow, groups_of
from consumers.losses.loss import GroupLoss, Tokens


class Rloo(GroupLoss):
    """The loss of "Back to basics", 2024."""

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
