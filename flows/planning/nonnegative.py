"""Least squares with coefficients that are at least 0, by the active set method of Lawson and Hanson."""

from __future__ import annotations

import numpy as np

_TINY = 1e-12


def nonnegative_fit(columns: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Return x ≥ 0 with the least |columns · x - goal|."""
    count = columns.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        slope = columns.T @ (goal - columns @ found)
        slope[free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= _TINY * max(1.0, float(np.abs(columns.T @ goal).max())):
            break
        free[best] = True
        found = _feasible(columns, goal, found, free)
    return found


def _feasible(columns: np.ndarray, goal: np.ndarray, found: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Solve for the free coefficients. One that would fall below 0 is fixed there, and it goes on."""
    while free.any():
        solved = np.zeros_like(found)
        solved[free] = np.linalg.lstsq(columns[:, free], goal, rcond=None)[0]
        if (solved[free] > 0).all():
            return solved
        below = free & (solved <= 0)
        step = float(np.min(found[below] / np.maximum(found[below] - solved[below], _TINY)))
        found = found + step * (solved - found)
        gone = below & (found <= _TINY * max(1.0, float(found.max())))
        free &= ~(gone if gone.any() else below)
        found[~free] = 0.0
    return np.zeros_like(found)
