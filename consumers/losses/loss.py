"""What a loss is. Two halves, since gradients are taken while samples still come:

    rewards of a group, or of the whole step ──► advantages, one a token        (numpy)
    logprobs of a micro-batch, with gradient ──► loss of each token             (torch)

A step's loss is sum(weight * loss of a token) / total, where the total is known only when all are here: it
divides the gradient at the end. So micro-batches can be trained in any order and size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from consumers.batches.training_rows import TrainingRow, groups_of
from schemas.messages import Sample
from schemas.runspec import RunSpec

# Added to deviations that rewards are divided by, as TRL does. Rewards that differ by less are hardly apart:
# with 1e-6, those of 1 and 1.0001 gave an advantage of 2.2, as large as right against wrong; now it is .66.
EPSILON = 1e-4


@dataclass(frozen=True)
class Tokens:
    """The drawn tokens of a micro-batch: one entry each."""

    logprobs: torch.Tensor  # with gradient
    anchor: torch.Tensor  # logprobs that ratios are taken to
    advantage: torch.Tensor
    owner: torch.Tensor  # the sequence that it is of, counted from 0
    lengths: torch.Tensor  # of sequences

    @property
    def ratio(self) -> torch.Tensor:
        """How much likelier each token is now."""
        return (self.logprobs - self.anchor).exp()

    def mean_of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean over its sequence."""
        sums = values.new_zeros(self.lengths.numel()).index_add(0, self.owner, values)
        return (sums / self.lengths)[self.owner]


@dataclass(frozen=True)
class Needs:
    """Which scores a loss needs."""

    reference: bool = False
    before: Literal["no", "step", "iteration"] = "no"  # weights at the beginning of which
    values: bool = False

    @property
    def any(self) -> bool:
        """Whether there is something to score."""
        return self.reference or self.before != "no" or self.values


class Loss(ABC):
    """One kind of loss, with a run's settings."""

    critic = False

    def __init__(self, spec: RunSpec) -> None:
        self.settings, self._longest = spec.loss, spec.sampling.max_tokens
        self._several_steps = spec.algorithm.optimizer_steps > 1

    @property
    def needs(self) -> Needs:
        """Which scores it needs."""
        first = self.settings.anchors_at_start and self._several_steps  # else they are the weights now
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
        """Of each row one for all its tokens, or one a token. None of a group may be missing."""

    @abstractmethod
    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        """Loss of each token."""

    def ratio(self, tokens: Tokens) -> torch.Tensor:
        """What is clipped."""
        return tokens.ratio

    def clips(self, tokens: Tokens) -> torch.Tensor:
        """Which tokens are held back by the clip."""
        low, high = self.settings.clip_low, self.settings.clip_high
        with torch.no_grad():
            ratio = self.ratio(tokens)
            found = torch.zeros_like(ratio, dtype=torch.bool)
            if high is not None:
                found |= (ratio > 1 + high) & (tokens.advantage > 0)
            if low is not None:
                found |= (ratio < 1 - low) & (tokens.advantage < 0)
        return found

    def clipped(self, tokens: Tokens) -> torch.Tensor:
        """PPO's loss: the gain, but none for going further than the clip allows."""
        ratio = self.ratio(tokens)
        bounded = ratio.clamp(1 - (self.settings.clip_low or 0.0), 1 + (self.settings.clip_high or 0.0))
        return -torch.minimum(ratio * tokens.advantage, bounded * tokens.advantage)

    def returns(self, row: TrainingRow, advantage: np.ndarray) -> np.ndarray:
        """What the critic should have said of each token."""
        raise NotImplementedError(f"{self.settings.kind} has no critic")

    def reward(self, row: TrainingRow) -> float:
        """What a sample is worth; NaN if that is not known."""
        sample = row.sample
        if sample.reward_error:
            return math.nan
        reward = float(sample.reward)
        if self.settings.kl and self.settings.kl_in == "reward":
            reward -= self.settings.kl * float(divergence(row, self.settings.kl_estimator or "k1").sum())
        return reward

    def weight(self, length: int) -> float:
        """Of each token of a sample of some length."""
        return {"sqrt": length**-0.5, "sequence": 1.0 / length}.get(str(self.settings.average), 1.0)

    def left_out(self, samples: Sequence[Sample]) -> set[int]:
        """Groups that neither have a gradient nor count in the average. None of a group may be missing."""
        return set()

    def total(self, samples: Sequence[Sample]) -> float:
        """What a step's gradient is divided by; exact in any order."""
        left_out = self.left_out(samples)
        lengths = [s.true_length for s in samples if not s.reward_error and s.group not in left_out]
        if self.settings.average == "sample":
            return float(len(lengths))
        if self.settings.average == "longest":
            return float(len(lengths) * self._longest)
        return math.fsum(length * self.weight(length) for length in lengths)

    def centred(self, rows: Sequence[TrainingRow], rewards: np.ndarray, *, scaled: bool) -> np.ndarray:
        """Rewards over their group: minus its mean; scaled: over its deviation.

        A sample without a reward gets 0, and does not touch the others.
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
    """The advantage of a sample is over its group, and the same for all its tokens."""

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        over = self.centred(rows, rewards, scaled=self.settings.advantage == "std")
        return [np.array([value]) for value in over]


def divergence(row: TrainingRow, estimator: str = "k1") -> np.ndarray:
    """How far the weights that drew each token are from the reference there, by an estimator."""
    reference = row.scores.reference
    assert reference is not None, "the reference was not asked"
    apart: np.ndarray = row.sample.logprobs.astype(np.float64) - reference
    if estimator == "k2":
        return apart**2 / 2
    return np.expm1(-apart) + apart if estimator == "k3" else apart


def whitened(values: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1; of values that hardly differ less: the deviation counts for 1e-4 at least."""
    found: np.ndarray = (values - values.mean()) / np.sqrt(values.var() + EPSILON**2)
    return found
