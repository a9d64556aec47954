"""GSPO: the ratio is that of the whole sequence to the power of 1/length, and is clipped as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumers.losses.loss import ClippedLoss, ClippedSettings, GroupSettings, Tokens
from schemas.losses import Average, average, clip_high, clip_low
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch


class GspoSettings(GroupSettings, ClippedSettings):
    """Settings of gspo."""

    average: Average = average("sequence")
    clip_low: float = clip_low(3e-4)
    clip_high: float = clip_high(4e-4)

    def make(self, spec: RunSpec) -> Gspo:
        return Gspo(self, spec)


class Gspo(ClippedLoss):
    """The loss of "Group sequence policy optimization", 2025."""

    settings: GspoSettings

    def ratio(self, tokens: Tokens) -> torch.Tensor:
        return tokens.mean_of_sequence(tokens.logprobs - tokens.anchor).exp()
