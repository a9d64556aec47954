"""The loop of `fixed_point.py` on CPUs, in one pass. Apart, because numba takes a second to import."""

from __future__ import annotations

import numpy as np

from infra.compiled import njit


@njit(cache=True, nogil=True)
def add_and_clear(
    gradient: np.ndarray, total: np.ndarray, scale: np.float32, limit: float
) -> np.float32 | float:
    """`total` += round(gradient * scale); gradient = 0. The largest magnitude; inf: beyond the limit."""
    most = np.float32(0)
    for place in range(gradient.size):
        size = abs(gradient[place])
        if not size < limit:
            return np.inf
        most = max(most, size)
        total[place] += np.int64(np.rint(gradient[place] * scale))
        gradient[place] = 0
    return most
