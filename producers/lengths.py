"""Length classes: quantile bins of predicted lengths. Each class is a partition of prompts and of samples."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

_MOVED = 0.05  # edges that moved by a smaller share stay


def class_edges(predicted: Sequence[float], classes: int) -> list[float] | None:
    """Return edges that put equally many lengths into each class, but for ties. None if all are alike."""
    ordered = sorted(predicted)
    if not ordered or ordered[-1] <= ordered[0] * 1.001:
        return None
    edges: list[float] = []
    for number in range(1, classes):
        edge = float(ordered[min(len(ordered) - 1, number * len(ordered) // classes)])
        edges.append(max(edge, edges[-1] + 1.0) if edges else edge)
    return edges


def have_moved(old: Sequence[float], new: Sequence[float]) -> bool:
    """Whether new edges differ enough from the old ones to be announced. Old edges may be infinite."""
    return any(not abs(after - before) <= _MOVED * after for before, after in zip(old, new, strict=True))


def class_of(length: float, edges: Sequence[float]) -> int:
    """Return the class of a length: the number of edges that are not above it."""
    return bisect.bisect_right(edges, length)
