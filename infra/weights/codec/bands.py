"""Which exponents go together: as many bands as pay for what they say of themselves."""

from __future__ import annotations

import numpy as np

from infra.weights.arrays import Array

MOST_BANDS = 16  # bands: as many as a scan tells apart at once
_HEAD_BITS = 8 * 70  # what a band's streams say of themselves


def band_edges(census: Array) -> Array:
    """The lowest exponent of each band, from a census of them: elements, changes, the sum of the steps."""
    there = np.flatnonzero(census[0])
    if there.size <= 1:
        return np.zeros(1, np.uint8)
    sums = np.zeros((3, there.size + 1))
    np.cumsum(census[:, there], axis=1, out=sums[:, 1:])
    n, k, steps = (row - row[:, None] for row in sums)  # of a band from one exponent to before another
    costs = _bits(n, k) + _bits(steps, k)  # steps of 1 and more: as if each further one were as likely
    head, firsts = _HEAD_BITS, _cheapest(costs + _HEAD_BITS)
    while len(firsts) > MOST_BANDS:
        head *= 2
        firsts = _cheapest(costs + head)
    edges: Array = there[firsts].astype(np.uint8)
    edges[0] = 0
    return edges


def band_table(edges: Array) -> Array:
    """The band of each exponent."""
    return (np.searchsorted(edges, np.arange(256), side="right") - 1).astype(np.uint8)


def _cheapest(costs: Array) -> list[int]:
    """Where bands begin, for all of them together to cost least."""
    best, start = np.zeros(len(costs)), np.zeros(len(costs), np.int64)
    for end in range(1, len(costs)):
        sums = best[:end] + costs[:end, end]
        start[end] = int(sums.argmin())
        best[end] = sums[start[end]]
    firsts, end = [], len(costs) - 1
    while end:
        end = int(start[end])
        firsts.append(end)
    return firsts[::-1]


def _bits(n: Array, k: Array) -> Array:
    """The least that saying which k of n elements change takes."""
    left = n - k
    with np.errstate(divide="ignore", invalid="ignore"):
        found = k * np.log2(n / k) + left * np.log2(n / left)
    return np.nan_to_num(found, nan=0.0, posinf=0.0)
