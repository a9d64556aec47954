"""How many seconds of an engine some samples take at least, if each has to be done within a time.

A sample of L tokens that is done within H seconds has a mean time of H / L for a token. A token that is drawn
in a batch of b takes s(b) seconds and occupies s(b) / b of its engine; batches of several sizes, one after
another, lie on the lines between their points. So the lower convex hull of all points (s(b), s(b) / b) says
what a token occupies at least: larger batches occupy less, and take longer.

    occupied │*                        a short time for a token: small batches, each token is dear
             │  *
             │     * .
             │          *  .   .   *   a long time: the largest batch, the cheapest token
             └────────────────────────── seconds for a token

This leaves out which samples are in a batch together, and so is a bound: it assumes that they can be packed
without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flows.planning.stage_times import EngineTimes

_EACH, _RATIO = 64, 1.02  # batch sizes that are looked at: each of the first so many, then ever fewer


class DecodeBound:
    """The least that tokens occupy of one engine, by the time that each may take."""

    def __init__(self, engine: EngineTimes, context: float) -> None:
        """`context`: how many tokens a sample attends to in a step, in the mean over all steps."""
        sizes = batch_sizes(engine.slots)
        steps = [
            engine.beside(size) * (engine.batch_s[size] + engine.context_s * size * context) for size in sizes
        ]
        slowest = np.maximum.accumulate(
            np.array(steps)
        )  # a larger batch is never quicker: noise of a profile
        self.token_s, self.occupied_s = _hull(slowest, slowest / np.array(sizes))

    @property
    def quickest_s(self) -> float:
        """The least time that a token takes."""
        return float(self.token_s[0])

    def occupied(self, token_s: np.ndarray) -> np.ndarray:
        """Return how many seconds a token occupies at least; infinity if it can't be drawn in its time."""
        found = np.interp(token_s, self.token_s, self.occupied_s)
        return np.where(token_s < self.token_s[0], np.inf, found)


def batch_sizes(slots: int) -> list[int]:
    """Return the batch sizes that are looked at."""
    found = list(range(1, min(slots, _EACH) + 1))
    while found[-1] < slots:
        found.append(min(slots, max(found[-1] + 1, int(found[-1] * _RATIO))))
    return found


def _hull(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower convex hull of points, as far as it falls."""
    points: list[tuple[float, float]] = []
    for here, high in sorted(zip(x.tolist(), y.tolist(), strict=True)):
        if points and high >= points[-1][1]:
            continue  # it takes longer and occupies no less
        while points and (
            points[-1][0] == here or (len(points) > 1 and _is_above(points[-2], points[-1], (here, high)))
        ):
            points.pop()
        points.append((here, high))
    found = np.array(points)
    return found[:, 0], found[:, 1]


def _is_above(first: Sequence[float], middle: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the middle point lies on the line from the first to the last, or above it."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])
