"""Which exponents go together: as many bands as pay for what they say of themselves."""

from __future__ import annotations

import numpy as np

from infra.weights.bits import Array

_HEAD_BITS = 8 * 70  # what a band's streams say of themselves


def bands_of(census: Array) -> Array:
    """The band of each exponent, from how many elements had it and how many of them changed."""
    elements, changed = (row.astype(np.float64) for row in census)
    there = np.flatnonzero(elements)
    if there.size <= 1:
        return np.zeros(elements.size, np.uint8)
    n, k = (np.concatenate([[0.0], np.cumsum(row[there])]) for row in (elements, changed))
    best, start = np.zeros(there.size + 1), np.zeros(there.size + 1, np.int64)
    for end in range(1, there.size + 1):
        costs = best[:end] + _bits(n[end] - n[:end], k[end] - k[:end]) + _HEAD_BITS
        start[end] = int(costs.argmin())
        best[end] = costs[start[end]]
    cuts, end = [], there.size
    while end:
        end = int(start[end])
        cuts.append(end)
    first = there[sorted(cuts)]  # the lowest exponent of each band
    return (np.searchsorted(first[1:], np.arange(elements.size), side="right")).astype(np.uint8)


def _bits(n: Array, k: Array) -> Array:
    """The least that saying which k of n elements change takes."""
    left = n - k
    with np.errstate(divide="ignore", invalid="ignore"):
        found = k * np.log2(n / k) + left * np.log2(n / left)
    return np.nan_to_num(found, nan=0.0, posinf=0.0)
