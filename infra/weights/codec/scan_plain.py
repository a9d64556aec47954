"""The scan of one tile in numpy: what `scan_fast.py` and `scan_gpu.py` compute, bit for bit."""

from __future__ import annotations

import numpy as np

from infra.weights.bits import Array, Kind, ordered, unordered
from infra.weights.codec.scan import Changes


def band_of(old: Array, kind: Kind, bands: Array) -> Array:
    """The band of each element."""
    exponents = (old >> old.dtype.type(kind.fraction)) & old.dtype.type(kind.exponents - 1)
    found: Array = bands[exponents]
    return found


def census(old: Array, new: Array, kind: Kind) -> Array:
    """By exponent of the old bits: how many elements there are, and how many change."""
    exponents = band_of(old, kind, np.arange(kind.exponents, dtype=np.uint8))
    changed = exponents[old != new]
    return np.stack([np.bincount(some, minlength=kind.exponents) for some in (exponents, changed)])


def scan(old: Array, new: Array, kind: Kind, bands: Array) -> Changes:
    """What changes, band by band."""
    where = np.flatnonzero(old != new)
    band = band_of(old, kind, bands)
    of_change = band[where]
    order = np.argsort(of_change, kind="stable")
    counts = np.bincount(of_change, minlength=int(bands.max()) + 1)
    gaps = np.empty(where.size, np.uint32)
    begin = 0
    for number, count in enumerate(counts.tolist()):
        mine = where[order[begin : begin + count]]
        if count:
            rank = np.searchsorted(np.flatnonzero(band == number), mine)
            gaps[begin : begin + count] = np.diff(rank, prepend=-1) - 1
        begin += count
    there = where[order]
    step = ordered(new[there], kind) - ordered(old[there], kind)
    return Changes(counts.astype(np.uint32), gaps, zigzag(step, kind))


def apply(data: Array, kind: Kind, bands: Array, changes: Changes) -> bool:
    """Make old bits new ones, in place; False if the changes are not of such a tile."""
    band = band_of(data, kind, bands)
    begin = 0
    for number, count in enumerate(changes.counts.tolist()):
        if not count:
            continue
        rank = np.cumsum(changes.gaps[begin : begin + count].astype(np.int64) + 1) - 1
        places = np.flatnonzero(band == number)
        if rank[-1] >= places.size:
            return False
        there = places[rank]
        steps = unzigzag(changes.steps[begin : begin + count], kind)
        data[there] = unordered(ordered(data[there], kind) + steps, kind)
        begin += count
    return True


def zigzag(step: Array, kind: Kind) -> Array:
    """Steps up and down as small numbers: 0, -1, 1, -2, 2 … are 0, 1, 2, 3, 4 …"""
    one = step.dtype.type(1)
    down: Array = step >> step.dtype.type(kind.bits - 1)
    return (step << one) ^ (step.dtype.type(0) - down)


def unzigzag(code: Array, kind: Kind) -> Array:
    """What `zigzag` was made of."""
    one = code.dtype.type(1)
    return (code >> one) ^ (code.dtype.type(0) - (code & one))
