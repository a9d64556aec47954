"""REINFORCE++: neither group nor critic; advantages are normalised over all tokens of a step.

With `kl_in: reward` a token's advantage is the reward less the divergence of this and all later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from consumers.batches.training_rows import TrainingRow, groups_of
from consumers.losses.loss import ClippedSettings, Loss, Tokens, divergence, whitened
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    import torch


class ReinforcePlusPlusSettings(ClippedSettings):
    """Settings of reinforce_pp."""

    advantage: Literal["plain", "mean"] = Field(
        "plain",
        description="plain: the reward. mean: the reward minus the group's mean. Either is then divided by "
        "the deviation in the whole step.",
    )

    def make(self, spec: RunSpec) -> ReinforcePlusPlus:
        return ReinforcePlusPlus(self, spec)


class ReinforcePlusPlus(Loss):
    """The loss of REINFORCE++, 2025; `advantage: mean` is its variant with the group's mean as baseline."""

    settings: ReinforcePlusPlusSettings

    @property
    def whole_step(self) -> bool:
        return True

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([np.nan if r.sample.reward_error else r.sample.reward for r in rows], dtype=float)
        if self.settings.advantage == "mean":
            known = ~np.isnan(rewards)
            rewards[known] = self.centred(rows, rewards, scaled=False)[known]
        result = [np.zeros(1)] * len(rows)
        ordered = [number for members in groups_of(rows) for number in members]
        ordered = [number for number in ordered if not np.isnan(rewards[number])]
        parts = [self._of_tokens(rows[number], float(rewards[number])) for number in ordered]
        if not parts:
            return result
        every = np.concatenate(parts)
        if every.std() > 1e-9:
            ends = np.cumsum([part.size for part in parts])[:-1]
            for number, part in zip(ordered, np.split(whitened(every), ends), strict=True):
                result[number] = part
        return result

    def _of_tokens(self, row: TrainingRow, reward: float) -> np.ndarray:
        if self.settings.kl and self.settings.kl_in == "reward":
            paid = self.settings.kl * divergence(row, self.settings.kl_estimator or "k1")
            found: np.ndarray = reward - np.cumsum(paid[::-1])[::-1]
            return found
        return np.full(row.sample.true_length, reward)

    def of_tokens(self, tokens: Tokens) -> torch.Tensor:
        return self.clipped(tokens)
