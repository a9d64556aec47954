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
from consumers.rows import Row, says_nothing
from schemas.messages import Sample


class Dapo(Grpo):
    """DAPO, 2025."""

    def advantages(self, rows: Sequence[Row]) -> list[np.ndarray]:
        rewards = np.array([self.reward(row) for row in rows])
        return [np.array([value]) for value in self.centred(rows, rewards, scaled=True)]

    def total(self, samples: Sequence[Sample]) -> float:
        if not self.settings.resample:
            return super().total(samples)
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        telling = [sample for members in groups.values() if not says_nothing(members) for sample in members]
        return super().total(telling or samples)

    def reward(self, row: Row) -> float:
        zone = self.settings.overlong_tokens or 0
        over = row.sample.true_length - (self._longest - zone)
        lost = (self.settings.overlong_penalty or 0.0) * over / zone if zone and over > 0 else 0.0
        return super().reward(row) - lost
