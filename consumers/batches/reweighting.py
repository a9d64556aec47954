"""How far recorded samples speak for other weights than those that drew them.

Each sample gets an importance weight: how much likelier the other weights make it than those that drew it.
The more the weights differ from each other, the fewer samples really count: the effective sample size,
(sum w)² / sum w². As a share of the samples it is 1 if all count alike, and near 0 if one outweighs the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from consumers.batches.training_rows import TrainingRow, groups_of

# From this share on a reward estimate was off by about as much as its error says, where the truth could be
# computed (docs/how-to/what-if.md). Below it a few samples decide.
LEAST_SHARE = 0.3


@dataclass(frozen=True)
class Reweighted:
    """Some samples as other weights would have drawn them."""

    of_samples: float  # effective sample size, as a share of the samples
    of_tokens: float  # the same by weights of single tokens, as a share of the tokens
    reward: float  # estimate of the mean reward on these prompts; NaN: no sample has a reward
    reward_error: float  # its standard error

    @property
    def believable(self) -> bool:
        """Whether enough of the samples count."""
        return min(self.of_samples, self.of_tokens) >= LEAST_SHARE


def reweighted(
    rows: Sequence[TrainingRow], logprobs: Sequence[np.ndarray], own: Sequence[bool]
) -> Reweighted:
    """Weight samples by what other weights say of them.

    `logprobs`: of each sample's tokens, under those weights. `own`: whether a sample was drawn by these very
    weights; then it weighs 1, although generator and trainer may compute its logprobs a little differently.
    """
    each = [
        np.zeros(row.sample.logprobs.size) if mine else now.astype(np.float64) - row.sample.logprobs
        for row, now, mine in zip(rows, logprobs, own, strict=True)
    ]
    weights = _weights(np.array([one.sum() for one in each]))
    of_tokens = _share(_weights(np.concatenate(each) if each else np.zeros(0)))
    reward, error = _mean_reward(rows, weights)
    return Reweighted(_share(weights), of_tokens, reward, error)


def _weights(logs: np.ndarray) -> np.ndarray:
    """Return weights whose largest is 1: only their ratios count, and none can overflow."""
    found: np.ndarray = np.exp(logs - logs.max(initial=-math.inf))
    return found


def _share(weights: np.ndarray) -> float:
    if not weights.size:
        return 1.0
    return float(weights.sum() ** 2 / (weights**2).sum() / weights.size)


def _mean_reward(rows: Sequence[TrainingRow], weights: np.ndarray) -> tuple[float, float]:
    """Return the self-normalised mean reward and its standard error.

    The prompts are fixed, so only the deviations inside each group count as errors.
    """
    rewards = np.array([math.nan if row.sample.reward_error else row.sample.reward for row in rows])
    known = ~np.isnan(rewards)
    total = float(weights[known].sum())
    if not total:
        return math.nan, math.nan
    mean = float((weights[known] * rewards[known]).sum() / total)
    squares = 0.0
    for group in groups_of(rows):
        members = np.array([number for number in group if known[number]], dtype=int)
        apart = weights[members] * (rewards[members] - mean)
        if members.size > 1:
            squares += members.size * float(apart.var(ddof=1))
        else:
            squares += float((apart**2).sum())
    return mean, math.sqrt(squares) / total
