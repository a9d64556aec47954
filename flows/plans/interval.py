"""A figure with the range that holds it in nine cases of ten."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A figure, and the range that holds it in nine cases of ten."""

    value: float
    low: float
    high: float

    def scaled(self, value: float) -> Interval:
        """Return another figure that grows with this one, with its range."""
        return Interval(value, value * self.low / self.value, value * self.high / self.value)

    def rate(self, value: float) -> Interval:
        """Return another figure that falls as this one grows, with its range."""
        return Interval(value, value * self.value / self.high, value * self.value / self.low)
