"""CISPO: REINFORCE with capped importance weights. Unlike a clip, the cap cuts off no token's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumers.losses.loss import GroupLoss, GroupSettings, Tokens
from schemas.losses import clip_high
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch


class CispoSettings(GroupSettings):
    """Settings of cispo."""

    clip_high: float = clip_high(4.0, "The weight of a token is capped at 1 + clip_high.")

    def make(self, spec: RunSpec) -> Cispo:
        return Cispo(self, spec)


class Cispo(GroupLoss):
    """The loss of MiniMax-M1, 2025."""

    settings: CispoSettings

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        weight = tokens.ratio.detach().clamp(max=1 + self.settings.clip_high)
        return -weight * tokens.advantage * tokens.logprobs

    def clips(self, tokens: Tokens) -> torch.Tensor:
        return tokens.ratio.detach() > 1 + self.settings.clip_high
