"""CISPO: REINFORCE with capped importance weights. Unlike a clip, the cap cuts off no token's gradient."""

from __future__ import annotations

import torch

from consumers.losses.loss import GroupLoss, Tokens


class Cispo(GroupLoss):
    """The loss of MiniMax-M1, 2025."""

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        weight = tokens.ratio.detach().clamp(max=1 + (self.settings.clip_high or 0.0))
        return -weight * tokens.advantage * tokens.logprobs

    def clips(self, tokens: Tokens) -> torch.Tensor:
        return tokens.ratio.detach() > 1 + (self.settings.clip_high or 0.0)
