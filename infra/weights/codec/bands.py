"""Sorts exponents into bands: into as many as save more than their headers cost."""

from __future__ import annotations

import numpy as np

from infra.weights.arrays import Array

MOST_BANDS = 16  # bands: as many as a scan tells apart at once
_HEAD_BITS = 8 * 70  # bits of the headers of a band's streams


def band_edges(census: Array) -> Array:
    """Return each band's lowest exponent. `census`: elements, changes and sum of steps, by exponent."""
    there = np.flatnonzero(census[0])
    if there.size <= 1:
        return np.zeros(1, np.uint8)
    sums = np.zeros((3, there.size + 1))
    np.cumsum(census[:, there], axis=1, out=sums[:, 1:])
    n, k, steps = (row - row[:, None] for row in sums)  # of a band: from one exponent, up to another
    costs = _bits(n, k) + _bits(steps, k)  # a step's size: each further place is as likely
    head, firsts = _HEAD_BITS, _cheapest(costs + _HEAD_BITS)
    while len(firsts) > MOST_BANDS:
        head *= 2
        firsts = _cheapest(costs + head)
    edges: Array = there[firsts].astype(np.uint8)
    edges[0] = 0
    return edges


def band_table(edges: Array) -> Array:
    """Return the band of each exponent."""
    return (np.searchsorted(edges, np.arange(256), side="right") - 1).astype(np.uint8)


def _cheapest(costs: Array) -> list[int]:
    """Return where bands begin, so that all of them together cost least."""
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
    """Return the fewest bits that can say which k of n elements change."""
    left = n - k
    with np.errstate(divide="ignore", invalid="ignore"):
        found = k * np.log2(n / k) + left * np.log2(n / left)
    return np.nan_to_num(found, nan=0.0, posinf=0.0)
