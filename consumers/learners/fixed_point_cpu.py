"""The loop of `fixed_point.py` for CPUs, in one pass. A separate module: numba takes a second to import."""

from __future__ import annotations

import numpy as np

from infra.compiled import njit


@njit(cache=True, nogil=True)
def add_and_clear(
    gradient: np.ndarray, total: np.ndarray, scale: np.float32, limit: float
) -> np.float32 | float:
    """Add round(gradient * scale) to `total`, and set `gradient` to zero.

    Returns the gradient's largest magnitude; infinity if that is not below `limit`.
    """
    most = np.float32(0)
    for place in range(gradient.size):
        size = abs(gradient[place])
        if not size < limit:
            return np.inf
        most = max(most, size)
        total[place] += np.int64(np.rint(gradient[place] * scale))
        gradient[place] = 0
    return most
