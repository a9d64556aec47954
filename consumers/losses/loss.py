"""The base of all losses. A loss has two halves, since gradients are taken while samples still come:

    rewards of a group, or of the whole step ──► advantages, one a token        (numpy)
    logprobs of a micro-batch, with gradient ──► loss of each token             (torch)

A step's loss is sum(weight * loss of a token) / total. The total is known only when all samples are here, so
it divides the gradient at the end, and micro-batches can be trained in any order and size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from consumers.batches.training_rows import TrainingRow, groups_of
from schemas.losses import LOSSES, LossSection, clip_high, clip_low
from schemas.messages import Sample
from schemas.runspec import RunSpec

if TYPE_CHECKING:  # a run file's loss is read in processes that never need torch
    import torch

# Added to the deviation that rewards are divided by, as in TRL, so that tiny differences stay small. With
# 1e-6, rewards of 1 and 1.0001 gave an advantage of 2.2, as large as right against wrong; now it is 0.66.
EPSILON = 1e-4


@dataclass(frozen=True)
class Tokens:
    """The drawn tokens of a micro-batch: one entry per token."""

    logprobs: torch.Tensor  # with gradient
    anchor: torch.Tensor  # logprobs that ratios compare with
    advantage: torch.Tensor
    owner: torch.Tensor  # index of each token's sequence
    lengths: torch.Tensor  # drawn tokens of each sequence

    @property
    def ratio(self) -> torch.Tensor:
        """The probability of each token now, divided by that of its anchor."""
        return (self.logprobs - self.anchor).exp()

    def mean_of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token the mean of `values` over its sequence."""
        sums = values.new_zeros(self.lengths.numel()).index_add(0, self.owner, values)
        return (sums / self.lengths)[self.owner]


@dataclass(frozen=True)
class Needs:
    """The scores that a loss needs."""

    reference: bool = False
    before: Literal["no", "step", "iteration"] = "no"  # logprobs under the first weights of this
    values: bool = False

    @property
    def any(self) -> bool:
        """Whether the loss needs any scores."""
        return self.reference or self.before != "no" or self.values


class LossSettings(LossSection, ABC):
    """The settings of a loss, which make the loss. A file that adds a loss extends this class."""

    @abstractmethod
    def make(self, spec: RunSpec) -> Loss:
        """Return the loss of a run."""


class GroupSettings(LossSettings):
    """Settings of a loss that compares a sample with its group."""

    advantage: Literal["mean", "std"] = Field(
        "std",
        description="mean: the reward minus the group's mean. std: that divided by the group's deviation.",
    )


class ClippedSettings(LossSettings):
    """Settings of a loss whose ratios are clipped."""

    clip_low: float = clip_low(0.2)
    clip_high: float = clip_high(0.2)


class CriticSettings(LossSettings):
    """Settings of a loss that trains a critic."""

    value_clip: float = Field(
        0.2, gt=0, le=1e6, description="Maximum change of the critic's value in a step."
    )
    value_learning_rate: float = Field(1e-5, gt=0, le=10, description="The critic's learning rate.")


class Loss(ABC):
    """One kind of loss, with a run's settings."""

    critic = False

    def __init__(self, settings: LossSettings, spec: RunSpec) -> None:
        self.settings, self._longest = settings, spec.sampling.max_tokens
        self._several_steps = spec.algorithm.optimizer_steps > 1

    @property
    def needs(self) -> Needs:
        """The scores that this loss needs."""
        first = self.settings.anchors_at_start and self._several_steps  # else those are the current weights
        return Needs(self.settings.needs_reference, "iteration" if first else "no", self.critic)

    @property
    def whole_step(self) -> bool:
        """Whether advantages need all samples of the step."""
        return False

    @property
    def trains_all(self) -> bool:
        """Whether samples without an advantage have a gradient too."""
        return self.critic or (self.settings.kl > 0 and self.settings.kl_in == "loss")

    @abstractmethod
    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        """Return for each row one advantage for all its tokens, or one per token. Groups must be whole."""

    @abstractmethod
    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        """Return the loss of each token."""

    def ratio(self, tokens: Tokens) -> torch.Tensor:
        """Return for each token the ratio that is clipped."""
        return tokens.ratio

    def clips(self, tokens: Tokens) -> torch.Tensor:
        """Return for each token whether the clip holds it back."""
        ratio = self.ratio(replace(tokens, logprobs=tokens.logprobs.detach()))
        if not isinstance(self.settings, ClippedSettings):
            return ratio.new_zeros(ratio.shape).bool()
        above = (ratio > 1 + self.settings.clip_high) & (tokens.advantage > 0)
        return above | ((ratio < 1 - self.settings.clip_low) & (tokens.advantage < 0))

    def clipped(self, tokens: Tokens) -> torch.Tensor:
        """Return PPO's loss of each token: going further than the clip allows brings no more gain."""
        assert isinstance(self.settings, ClippedSettings), "the loss has no clip_low and clip_high"
        ratio = self.ratio(tokens)
        bounded = ratio.clamp(1 - self.settings.clip_low, 1 + self.settings.clip_high)
        return -(ratio * tokens.advantage).minimum(bounded * tokens.advantage)

    def returns(self, row: TrainingRow, advantage: np.ndarray) -> np.ndarray:
        """Return the value that the critic should have predicted for each token."""
        raise NotImplementedError(f"{self.settings.kind} has no critic")

    def reward(self, row: TrainingRow) -> float:
        """Return a sample's reward, less its divergence if `kl_in` is `reward`; NaN if it has no reward."""
        sample = row.sample
        if sample.reward_error:
            return math.nan
        reward = float(sample.reward)
        if self.settings.kl and self.settings.kl_in == "reward":
            reward -= self.settings.kl * float(divergence(row, self.settings.kl_estimator or "k1").sum())
        return reward

    def weight(self, length: int) -> float:
        """Return the weight of each token of an answer that has `length` tokens."""
        return {"sqrt": length**-0.5, "sequence": 1.0 / length}.get(str(self.settings.average), 1.0)

    def left_out(self, samples: Sequence[Sample]) -> set[int]:
        """Return the groups that have no gradient and do not count in the average. Groups must be whole."""
        return set()

    def total(self, samples: Sequence[Sample]) -> float:
        """Return the divisor of a step's gradient; its bits do not depend on the order of the samples."""
        left_out = self.left_out(samples)
        lengths = [s.true_length for s in samples if not s.reward_error and s.group not in left_out]
        if self.settings.average == "sample":
            return float(len(lengths))
        if self.settings.average == "longest":
            return float(len(lengths) * self._longest)
        return math.fsum(length * self.weight(length) for length in lengths)

    def centred(self, rows: Sequence[TrainingRow], rewards: np.ndarray, *, scaled: bool) -> np.ndarray:
        """Subtract from each reward the mean of its group; if `scaled`, divide by the group's deviation.

        A sample without a reward (NaN) gets 0 and does not influence the others.
        """
        result = np.zeros(len(rows))
        for members in map(np.array, groups_of(rows)):
            known = members[~np.isnan(rewards[members])]
            if known.size < 2:
                continue  # no baseline
            over = rewards[known] - rewards[known].mean()
            if not np.any(np.abs(over) > 1e-9):
                continue  # all alike: nothing to learn, and no rounding error to learn from
            result[known] = over / (rewards[known].std() + EPSILON) if scaled else over
        return result


class GroupLoss(Loss):
    """A loss whose advantages compare a sample with its group, and are the same for all its tokens."""

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        scaled = isinstance(self.settings, GroupSettings) and self.settings.advantage == "std"
        over = self.centred(rows, rewards, scaled=scaled)
        return [np.array([value]) for value in over]


class ClippedLoss(GroupLoss):
    """A loss of groups whose ratios are clipped, as PPO does it."""

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return self.clipped(tokens)


def loss_of(spec: RunSpec) -> Loss:
    """Return the run's loss."""
    settings = LOSSES.loaded(spec.loss)
    assert isinstance(settings, LossSettings)
    return settings.make(spec)


def divergence(row: TrainingRow, estimator: str = "k1") -> np.ndarray:
    """Estimate for each token how far the weights that drew it are from the reference: `k1`, `k2` or `k3`."""
    reference = row.scores.reference
    assert reference is not None, "the logprobs of the reference are missing"
    apart: np.ndarray = row.sample.logprobs.astype(np.float64) - reference
    if estimator == "k2":
        return apart**2 / 2
    return np.expm1(-apart) + apart if estimator == "k3" else apart


def whitened(values: np.ndarray) -> np.ndarray:
    """Shift values to mean 0 and scale them to deviation 1; less if they hardly differ (EPSILON)."""
    found: np.ndarray = (values - values.mean()) / np.sqrt(values.var() + EPSILON**2)
    return found
