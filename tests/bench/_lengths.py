"""Lengths as in the paper: its histogram of outputs up to 20K tokens, and its latency curve."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from producers.dispatch.curve import LatencyCurve

# Figure 7: bin densities over 0.9K to 20K tokens
_DENSITIES = (
    19.7, 26.6, 19.1, 18.3, 12.2, 9.7, 8.3, 4.8, 5.3, 3.4, 2.5, 3.6, 2.5, 0.8, 1.1, 0.7, 1.1, 0.5, 2.1, 1.3,
    1.4, 3.1, 1.0, 1.2, 1.3, 1.7, 1.5, 1.7, 1.1, 1.4,
)  # fmt: skip
_LOW, _HIGH = 900.0, 20_000.0
SHARES = tuple(density / sum(_DENSITIES) for density in _DENSITIES)
EDGES = tuple(float(edge) for edge in np.linspace(_LOW, _HIGH, len(_DENSITIES) + 1))

# Figure 6: 7B on one H800, milliseconds a token
CURVE = LatencyCurve(
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    tuple(ms / 1000 for ms in (8.4, 8.8, 8.9, 9.0, 9.4, 10.2, 11.7, 15.3, 21.5, 36.9)),
)


def paper_lengths(count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Drawn from the histogram, scaled to `longest`."""
    shares = np.array(_DENSITIES) / sum(_DENSITIES)
    width = (_HIGH - _LOW) / len(_DENSITIES)
    drawn = _LOW + (rng.choice(len(shares), count, p=shares) + rng.random(count)) * width
    return np.maximum(1, np.floor(drawn * longest / _HIGH)).astype(int)


def work_of_pace(tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Corners of g: what a token costs its generator at the least, by the seconds that it takes.

    A token made in a batch of b takes PTL(b), and 1/b of that from its generator; g is the lower convex hull
    of those points.
    """
    points = sorted({(float(t[b]), float(t[b]) / b) for t in tables for b in range(1, len(t))})
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) >= 2 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    xs, ys = np.array(hull).T
    return xs, ys


def bound(lengths: Sequence[int], tables: Sequence[np.ndarray]) -> float:
    """No schedule is faster: sum of g(T / L) L <= N T, and the longest alone on the fastest.

    With unequal generators the envelope is over all of them, which keeps it a bound.
    """
    xs, ys = work_of_pace(tables)
    wanted = np.asarray(lengths, float)

    def fits(seconds: float) -> bool:
        work = np.interp(seconds / wanted, xs, ys) * wanted
        return float(work.sum()) <= len(tables) * seconds

    low = float(wanted.max()) * xs[0]
    if fits(low):
        return low
    high = low * 2
    while not fits(high):
        high *= 2
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
