"""PPO with a critic: advantages of each token by generalised advantage estimation.

delta_t = r_t + discount * V_{t+1} - V_t          r_t: the reward, at the last token; with `kl_in: reward`
A_t = delta_t + discount * lambda * A_{t+1}          each token also pays for its divergence
the critic learns A_t + V_t
the policy is trained with A_t; `whiten` brings A_t over all tokens of a step to mean 0 and deviation 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from consumers.batches.training_rows import TrainingRow, groups_of
from consumers.losses.loss import ClippedSettings, CriticSettings, Loss, Tokens, divergence, whitened
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch


class PpoSettings(ClippedSettings, CriticSettings):
    """Settings of ppo."""

    discount: float = Field(1.0, gt=0, le=1, description="The discount of rewards, a token.")
    gae_lambda: float = Field(
        0.95,
        ge=0,
        le=1,
        description="The lambda of GAE. 1: returns are the rewards that came; 0: the critic's word for "
        "the next token.",
    )
    whiten: bool = Field(
        True,
        description="Give advantages mean 0 and deviation 1 over all tokens of a step, so that a "
        "step's size does not follow the rewards' scale. A step is then computed when its last "
        "sample is there. false: advantages stay as the critic leaves them, and samples are "
        "trained as they come.",
    )

    def make(self, spec: RunSpec) -> Ppo:
        return Ppo(self, spec)


class Ppo(Loss):
    """The loss of Schulman et al., 2017, as it is used on language models."""

    settings: PpoSettings

    critic = True

    @property
    def whole_step(self) -> bool:
        return bool(self.settings.whiten)

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        found = [np.zeros(1) if row.sample.reward_error else self._of_tokens(row) for row in rows]
        if not self.settings.whiten:
            return found
        # by group and index: a sum's bits depend on the order
        known = [n for group in groups_of(rows) for n in group if not rows[n].sample.reward_error]
        if known:
            ends = np.cumsum([found[number].size for number in known])[:-1]
            parts = np.split(whitened(np.concatenate([found[number] for number in known])), ends)
            for number, part in zip(known, parts, strict=True):
                found[number] = part
        return found

    def _of_tokens(self, row: TrainingRow) -> np.ndarray:
        values = row.scores.values
        assert values is not None, "the values of the critic are missing"
        rewards = np.zeros(row.sample.true_length)
        if self.settings.kl and self.settings.kl_in == "reward":
            rewards -= self.settings.kl * divergence(row, self.settings.kl_estimator or "k1")
        rewards[-1] += row.sample.reward
        discount, keep = self.settings.discount, self.settings.gae_lambda
        found = np.zeros(rewards.size)
        after, next_value = 0.0, 0.0
        for place in range(rewards.size - 1, -1, -1):
            value = float(values[place])
            after = rewards[place] + discount * next_value - value + discount * keep * after
            found[place], next_value = after, value
        return found

    def returns(self, row: TrainingRow, advantage: np.ndarray) -> np.ndarray:
        assert row.scores.values is not None
        own = self._of_tokens(row) if self.settings.whiten else advantage
        found: np.ndarray = own + row.scores.values
        return found

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return self.clipped(tokens)
