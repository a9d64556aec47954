"""The policy loss: clipped ratio to the weights that drew each token (GRPO when averaged over tokens)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consumers.batching import MicroBatch
from schemas.runspec import AlgorithmSection


@dataclass(frozen=True)
class LossStats:
    """What a micro-batch's loss was made of: sums over tokens, so that they add up over a step."""

    loss: float
    tokens: int
    clipped: int
    negative_logprob: float
    gap: float  # largest difference to the behaviour logprobs, of samples made by these very weights
    gap_tokens: int
    drift: float  # sum of absolute differences to the behaviour logprobs, of all tokens


def policy_loss(
    logprobs: torch.Tensor, batch: MicroBatch, algorithm: AlgorithmSection
) -> tuple[torch.Tensor, LossStats]:
    """The sum over tokens of weight * loss; the step divides by the sum of all weights."""
    change = logprobs - batch.behaviour
    ratio = change.exp()
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain = torch.minimum(ratio * batch.advantage, clipped * batch.advantage)
    loss = -(batch.weight * gain).sum()
    with torch.no_grad():
        distance = change.abs()
        exact = distance[batch.on_policy]
        stats = LossStats(
            loss=float(loss.detach()),
            tokens=int(ratio.numel()),
            clipped=int((clipped * batch.advantage < ratio * batch.advantage).sum()),
            negative_logprob=float(-logprobs.sum()),
            gap=float(exact.max()) if exact.numel() else 0.0,
            gap_tokens=int(exact.numel()),
            drift=float(distance.sum()),
        )
    return loss, stats
