"""A drift: how the samples of now differ from those that the beliefs were learned of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Drift:
    """How the samples of now differ, by all that is seen."""

    shift: float = 0.0  # by how much the log of each length exceeds its belief
    error: float = 0.0  # standard deviation of `shift`
    wild: float = 0.0  # share of predictions that say nothing
    of_predictions: bool = False  # whether predictions are shifted, and not lengths

    def differs(self, other: Drift) -> bool:
        """Whether a plan that was made by the other one should be made anew."""
        return abs(self.shift - other.shift) > max(0.05, other.error) or (
            abs(self.wild - other.wild) > 0.03 + 0.5 * other.wild
        )


NO_DRIFT = Drift()
