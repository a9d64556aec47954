"""The loss of a micro-batch: the run's kind of loss, corrected for old weights, plus the divergence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from consumers.batches.micro_batches import MicroBatch
from consumers.losses.loss import Loss, Tokens


@dataclass(frozen=True)
class LossStats:
    """Numbers about a micro-batch's loss. All but `gap` are sums over tokens that add up over a step."""

    loss: float
    tokens: int
    clipped: int
    negative_logprob: float
    gap: float  # largest difference to the behaviour logprobs, of tokens of `MicroBatch.fresh`
    gap_tokens: int
    drift: float  # sum of absolute differences to the behaviour logprobs, of all tokens
    capped: int  # corrections of old weights that met their cap
    divergence: float  # from the reference
    entropy: float = 0.0  # of `entropy_tokens` tokens
    entropy_tokens: int = 0
    value_error: float = 0.0  # of the critic, squared
    returns: float = 0.0  # squared; the error is compared with them
    digest: int = 0  # of the logprobs
    means: list[float] = field(default_factory=list)  # of each sample's logprobs
    gaps: list[float] = field(default_factory=list)  # of each sample: largest difference to the behaviour


@dataclass(frozen=True)
class Measured:
    """The figures of a loss, as tensors: to read a number from a GPU is to wait for it."""

    numbers: torch.Tensor  # fp64, in the order of `objective`
    logprobs: torch.Tensor
    drift: torch.Tensor

    def stats(self, batch: MicroBatch) -> LossStats:
        """Return the numbers; `batch` may lie elsewhere."""
        numbers, logprobs, drift = (one.cpu().numpy() for one in (self.numbers, self.logprobs, self.drift))
        loss, clipped, negative, gap, gap_tokens, drifted, capped, divergence = numbers.tolist()
        return LossStats(
            loss=loss, tokens=logprobs.size, clipped=int(clipped), negative_logprob=negative, gap=gap,
            gap_tokens=int(gap_tokens), drift=drifted, capped=int(capped), divergence=divergence,
            digest=xxh3_64_intdigest(logprobs), means=means_of(logprobs, batch).tolist(),
            gaps=_largest(drift, batch),
        )  # fmt: skip


def objective(logprobs: torch.Tensor, batch: MicroBatch, loss: Loss) -> tuple[torch.Tensor, Measured]:
    """Return the sum over tokens of weight * loss. The step divides it by the loss's total."""
    settings, now = loss.settings, logprobs.detach()
    anchor, correction, capped = batch.behaviour, None, now.new_zeros(())
    if settings.correction != "none":
        anchor = now if batch.before is None else batch.before
        likelier = (anchor - batch.behaviour).exp()
        correction, above = likelier.clamp(max=settings.correction_cap), likelier > settings.correction_cap
        if not settings.correct_fresh:
            # Only whole samples of this version are exempt: in others an old KV cache may have been used.
            correction, above = torch.where(batch.fresh, 1.0, correction), above & ~batch.fresh
        capped = above.sum()
    # Owners are in order. To count them, torch would wait for the GPU.
    ends = torch.arange(batch.packing.sequences, device=batch.owner.device)
    lengths = torch.searchsorted(batch.owner, ends, right=True) - torch.searchsorted(batch.owner, ends)
    tokens = Tokens(logprobs, anchor, batch.advantage, batch.owner, lengths)
    each = loss.of_tokens(tokens)
    if correction is not None:
        each = each * correction
    farther = now.new_zeros(())
    if batch.reference is not None:
        less = batch.reference - logprobs
        farther = less.exp() - less - 1  # never negative, and its mean is the divergence (k3)
        if settings.kl and settings.kl_in == "loss":
            paid = {"k1": -less, "k2": less**2 / 2}.get(settings.kl_estimator or "k3", farther)
            each = each + settings.kl * paid
    total = (batch.weight * each).sum()
    with torch.no_grad():
        exact = ((now if batch.before is None else batch.before) - batch.behaviour).abs()
        drift = (now - batch.behaviour).abs()
        numbers = [
            total, loss.clips(tokens).sum(), -now.sum(), torch.where(batch.fresh, exact, 0.0).max(),
            batch.fresh.sum(), drift.sum(), capped, farther.sum(),
        ]  # fmt: skip
        measured = Measured(torch.stack([one.double() for one in numbers]), now, drift)
    return total, measured


def means_of(values: np.ndarray, batch: MicroBatch) -> np.ndarray:
    """Return the mean of each sample's values; there is one value a drawn token."""
    owner, samples = batch.owner.cpu().numpy(), batch.packing.sequences
    sums = np.bincount(owner, weights=values, minlength=samples)
    return sums / np.maximum(1, np.bincount(owner, minlength=samples))


def _largest(values: np.ndarray, batch: MicroBatch) -> list[float]:
    """Return the largest of each sample's values, which are not below 0; 0 for a sample without a token."""
    largest = np.zeros(batch.packing.sequences)
    np.maximum.at(largest, batch.owner.cpu().numpy(), values)
    return largest.tolist()
