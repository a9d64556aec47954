"""GSPO: the ratio is that of the whole sequence to the power of 1/length, and is clipped as a whole."""

from __future__ import annotations

import torch

from consumers.losses.loss import GroupLoss, Tokens


class Gspo(GroupLoss):
    """The loss of "Group sequence policy optimization", 2025."""

    def ratio(self, tokens: Tokens) -> torch.Tensor:
        return tokens.mean_of_sequence(tokens.logprobs - tokens.anchor).exp()

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return self.clipped(tokens)
