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

from consumers.losses.grpo import Grpo
from consumers.rows import Row


class Dapo(Grpo):
    """DAPO, 2025."""

    def advantages(self, rows: Sequence[Row]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        return [np.array([value]) for value in self.centred(rows, rewards, scaled=True)]

    def reward(self, row: Row) -> float:
        zone = self.settings.overlong_tokens or 0
        over = row.sample.true_length - (self._longest - zone)
        lost = (self.settings.overlong_penalty or 0.0) * over / zone if zone and over > 0 else 0.0
        return super().reward(row) - lost
