"""GRPO: the group's mean reward is the baseline, its deviation the unit; ratios are clipped per token."""

from __future__ import annotations

import torch

from consumers.losses.loss import GroupLoss, Tokens


class Grpo(GroupLoss):
    """The loss of DeepSeekMath, 2024."""

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return self.clipped(tokens)
