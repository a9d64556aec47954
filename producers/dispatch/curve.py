"""Latency curves: the duration of a decode step by its number of samples. Each generator has its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.errors import Explained

SHORTEST_S, LONGEST_S = 1e-7, 3600.0  # of a step


class CurveError(Explained):
    """A reported latency curve is impossible."""


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of a step at some batch sizes; linear in between, and extended beyond the last two."""

    batches: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise CurveError if no engine can have measured this."""
        sizes = list(self.batches)
        if not sizes or len(sizes) != len(self.seconds):
            raise CurveError(f"a latency curve needs a time for each of its batch sizes: {sizes}")
        if sizes != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= 1 << 20:
            raise CurveError(f"batch sizes of a latency curve must grow from 1 on: {sizes}")
        for size, time in zip(sizes, self.seconds, strict=True):
            if not SHORTEST_S <= time <= LONGEST_S:  # false for NaN, too
                raise CurveError(f"a step of {size} samples can't take {time} s")

    def table(self, slots: int) -> np.ndarray:
        """Return the seconds of a step with 0 (as with 1) to `slots` samples.

        A larger batch is never faster.
        """
        sizes = np.arange(slots + 1)
        sizes[0] = 1
        times = np.interp(sizes, self.batches, self.seconds)
        if len(self.batches) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.batches[-1] - self.batches[-2])
            beyond = sizes > self.batches[-1]
            times[beyond] += max(0.0, slope) * (sizes[beyond] - self.batches[-1])
        return np.maximum.accumulate(times)

    def scaled(self, factor: float) -> LatencyCurve:
        """Return a curve that is `factor` times as slow."""
        return LatencyCurve(self.batches, tuple(time * factor for time in self.seconds))


def flat(seconds: float = 0.01) -> LatencyCurve:
    """Return the curve that stands in for one that can't be used: each step takes `seconds`."""
    return LatencyCurve((1,), (seconds,))


def curve_of(batches: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
    """Return the curve of a report's lists. Raises CurveError if it is impossible."""
    return LatencyCurve(tuple(int(size) for size in batches), tuple(float(time) for time in seconds))
