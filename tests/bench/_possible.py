"""About how fast a policy could be that knows no more than what is believed: what is left to gain.

A relaxation. Each sample gets a pace (seconds a token) for each point of its life; it may move at any time
for nothing, and batches are fractions. All who live so long are there to be made, so a sample's pace at x
costs in proportion to how likely it lives up to x: slow as long as it may be one of many, fast for the few
that go on. The least T is sought at which what is believed of each sample, up to its SURE quantile, ends by
T, and expected work fits. Not a bound for one draw, which may be lucky.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from tests.bench._lengths import work_of_pace

SURE = 0.95


def possible(beliefs: np.ndarray, tables: Sequence[np.ndarray]) -> float:
    """Seconds, for rows of equally likely lengths."""
    paces, work = work_of_pace(tables)
    slopes = np.diff(work) / np.diff(paces)
    low = float(np.quantile(beliefs, SURE, axis=1).max() * paces[0])
    if _work(beliefs, paces, work, slopes, low) <= len(tables) * low:
        return low
    high = low * 1.1
    while _work(beliefs, paces, work, slopes, high) > len(tables) * high:
        high *= 1.1
    while high / low > 1.002:
        middle = (low + high) / 2
        fits = _work(beliefs, paces, work, slopes, middle) <= len(tables) * middle
        low, high = (low, middle) if fits else (middle, high)
    return high


@njit(cache=True)
def _work(
    beliefs: np.ndarray, paces: np.ndarray, work: np.ndarray, slopes: np.ndarray, seconds: float
) -> float:
    """Instance-seconds that it takes if each sample, as far as it is reckoned with, takes `seconds`.

    Where the price of time is mu, a part that is lived with likelihood s has the pace at which a second more
    saves mu / s of work; mu is found by bisection.
    """
    count = beliefs.shape[1]
    sure = int(np.ceil(SURE * count))
    total = 0.0
    for row in beliefs:
        low, high = -14.0, 8.0  # the logarithm of mu
        needed = 0.0
        for _ in range(26):
            price = np.exp((low + high) / 2)
            taken, needed, before = 0.0, 0.0, 0.0
            for k in range(count):
                lived = (count - k) / count
                part = row[k] - before
                before = row[k]
                place = np.searchsorted(slopes, -price / lived)
                needed += work[place] * part * lived
                if k < sure:
                    taken += paces[place] * part
            if taken > seconds:
                low = (low + high) / 2
            else:
                high = (low + high) / 2
        total += needed
    return total
