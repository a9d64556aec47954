"""Plans of drafts for an engine of several ranks: rank 0 decides by its clock, and the others hear how.

A step with drafts computes other rows than one without, so all ranks must decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from producers.engines.draft_plan import DraftPlan

Share = Callable[[Callable[[], Sequence[float]]], Sequence[float]]


class SharedPlan(DraftPlan):
    """Decides as rank 0 does."""

    def __init__(self, share: Share) -> None:
        """`share`: returns what rank 0 decided; there it calls what is given, and tells all others."""
        super().__init__()
        self._share = share

    def attention(self, samples: int) -> int:
        return int(self._share(lambda: [DraftPlan.attention(self, samples)])[0])

    def lengths(self, samples: int, looked: int, chances: Sequence[Sequence[float]]) -> list[int]:
        found = self._share(lambda: DraftPlan.lengths(self, samples, looked, chances))
        return [int(one) for one in found]

    def least_chance(self, samples: int) -> float:
        return self._share(lambda: [DraftPlan.least_chance(self, samples)])[0]
