"""Axes of charts: round numbers at which ticks stand, numbers as people read them, and points put in bins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BINS = 200


@dataclass(frozen=True)
class Axis:
    """A range of values that is drawn from one pixel to another."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the pixel of a value, within the range."""
        low, high = self._of(self.low), self._of(self.high)
        share = (self._of(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values inside of the range."""
        if self.log:
            return self._log_ticks(most)
        return self._even_ticks(most)

    def _even_ticks(self, most: int) -> list[float]:
        raw = (self.high - self.low) / most
        step = 10.0 ** math.floor(math.log10(raw))
        step *= next(factor for factor in (1, 2, 2.5, 5, 10) if factor * step >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        return [round((first + number) * step, 12) for number in range(count)]

    def _log_ticks(self, most: int) -> list[float]:
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if high - low >= 2:
            every = max(1, math.ceil((high - low + 1) / most))
            return [10.0**power for power in range(low, high + 1, every)]
        powers = range(low - 1, high + 1)
        found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        inside = [value for value in found if self.low <= value <= self.high]
        return inside if len(inside) > 1 else self._even_ticks(most)


def axis_of(
    values: Sequence[float], start: float, end: float, *, log: bool = False, zero: bool = False
) -> Axis:
    """Return an axis that shows all values, with some room. `zero`: it begins at 0 if none is below."""
    fine = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(fine), max(fine)) if fine else (0.1, 1.0)
    if log:
        return Axis(low / 1.3, high * 1.3, start, end, log=True)
    if zero and low >= 0:
        low = 0.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Axis(low if low == 0.0 and zero else low - room, high + room, start, end)


def in_words(value: float) -> str:
    """Write a number as people read it on a chart: 12.3k, 0.05, 2e-05."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.2g}"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= factor:
            return f"{value / (1e3 if unit == 'k' else factor):.3g}{unit}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


@dataclass(frozen=True)
class Bin:
    """Points that are near each other on the x axis, as one."""

    x: float
    mean: float
    low: float
    high: float


def in_bins(points: Sequence[tuple[float, float]], count: int = BINS) -> list[Bin]:
    """Return at most `count` bins of points, which are in the order of x. Others than finite are left out."""
    found = np.array([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)], np.float64)
    if not found.size:
        return []
    parts = np.array_split(found, min(count, len(found)))
    return [
        Bin(
            float(part[:, 0].mean()),
            float(part[:, 1].mean()),
            float(part[:, 1].min()),
            float(part[:, 1].max()),
        )
        for part in parts
    ]
