"""Measures how long decode steps take, by the number of samples in them."""

from __future__ import annotations

from producers.engines.engine import Pace

_FADE = 0.995  # weight of an old step after each new one of about the same size: speeds change
_ENOUGH = 5.0


class StepTimes:
    """Mean step times for batches of about equal size: 1, 2, 3-4, 5-8 and so on."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}  # weight, samples, seconds

    def add(self, samples: int, seconds: float) -> None:
        """Note a step with so many samples."""
        size = (samples - 1).bit_length()
        weight, total, time = self._sums.get(size, (0.0, 0.0, 0.0))
        self._sums[size] = weight * _FADE + 1, total * _FADE + samples, time * _FADE + seconds

    def expect(self, samples: int, seconds: float) -> None:
        """Note a time that was measured by a profile. It counts as well known until steps say otherwise."""
        self._sums[(samples - 1).bit_length()] = _ENOUGH, _ENOUGH * samples, _ENOUGH * seconds

    def pace(self) -> Pace:
        """Return the step times that are well known."""
        points = {
            round(total / weight): time / weight
            for _, (weight, total, time) in sorted(self._sums.items())
            if weight >= _ENOUGH
        }
        return Pace(list(points), list(points.values()))
