"""DAPO: all tokens of a step count alike, the upper clip is wider, and answers that get too long lose reward.

reward lost   0 ──────────┐
                           ╲
                            ╲
-overlong_penalty            ╲
                          │   │
       max_tokens - overlong  max_tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from consumers.batches.training_rows import TrainingRow, says_nothing
from consumers.losses.grpo import Grpo
from schemas.messages import Sample


class Dapo(Grpo):
    """The loss of DAPO, 2025."""

    def advantages(self, rows: Sequence[TrainingRow]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        return [np.array([value]) for value in self.centred(rows, rewards, scaled=True)]

    def left_out(self, samples: Sequence[Sample]) -> set[int]:
        groups: dict[int, list[Sample]] = {}
        for sample in samples if self.settings.resample else ():
            groups.setdefault(sample.group, []).append(sample)
        return {group for group, members in groups.items() if says_nothing(members)}

    def reward(self, row: TrainingRow) -> float:
        zone = self.settings.overlong_tokens or 0
        over = row.sample.true_length - (self._longest - zone)
        lost = (self.settings.overlong_penalty or 0.0) * over / zone if zone and over > 0 else 0.0
        return super().reward(row) - lost
