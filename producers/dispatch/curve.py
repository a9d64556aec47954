"""How long a decode step takes by the number of samples in it: each instance has its own curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infra.errors import Explained

SHORTEST_S, LONGEST_S = 1e-7, 3600.0  # of a step


class CurveError(Explained):
    """A profile is nonsense."""


@dataclass(frozen=True)
class LatencyCurve:
    """Seconds of a step at some batch sizes; linear in between, and on beyond the last two."""

    batches: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse what no engine can have measured."""
        sizes = list(self.batches)
        if not sizes or len(sizes) != len(self.seconds):
            raise CurveError(f"a latency curve needs a time for each of its batch sizes: {sizes}")
        if sizes != sorted(set(sizes)) or not 1 <= sizes[0] <= sizes[-1] <= 1 << 20:
            raise CurveError(f"batch sizes of a latency curve must grow from 1 on: {sizes}")
        for size, time in zip(sizes, self.seconds, strict=True):
            if not SHORTEST_S <= time <= LONGEST_S:  # nor is NaN
                raise CurveError(f"a step of {size} samples can't take {time} s")

    def table(self, slots: int) -> np.ndarray:
        """Seconds of a step of 0 (as of 1) to `slots` samples. Never falls: more samples are not faster."""
        sizes = np.arange(slots + 1)
        sizes[0] = 1
        times = np.interp(sizes, self.batches, self.seconds)
        if len(self.batches) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.batches[-1] - self.batches[-2])
            beyond = sizes > self.batches[-1]
            times[beyond] += max(0.0, slope) * (sizes[beyond] - self.batches[-1])
        return np.maximum.accumulate(times)

    def scaled(self, factor: float) -> LatencyCurve:
        """The same shape, `factor` times as slow."""
        return LatencyCurve(self.batches, tuple(time * factor for time in self.seconds))


def flat(seconds: float = 0.01) -> LatencyCurve:
    """What is supposed of an instance whose profile can't be used: any batch takes as long."""
    return LatencyCurve((1,), (seconds,))


def curve_of(batches: Sequence[int], seconds: Sequence[float]) -> LatencyCurve:
    """Of a report's lists."""
    return LatencyCurve(tuple(int(size) for size in batches), tuple(float(time) for time in seconds))
