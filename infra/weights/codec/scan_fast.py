"""The scan of one tile, compiled. Without the interpreter's lock: threads share a model's tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit

from infra.weights.bits import Array, Kind
from infra.weights.codec.scan import Changes

_ROOM = 8  # at first there is room for changes of one in so many elements


def census(old: Array, new: Array, kind: Kind) -> Array:
    """By exponent of the old bits: how many elements there are, and how many change."""
    found = np.zeros((2, kind.exponents), np.int64)
    _compiled(kind)[0](old, new, found)
    return found


def scan(old: Array, new: Array, kind: Kind, bands: Array) -> Changes:
    """What changes, band by band."""
    room, count = max(64, old.size // _ROOM), -1
    while count < 0:
        room = min(room, old.size)
        gaps, steps = np.empty(room, np.uint32), np.empty(room, old.dtype)
        band, same = np.empty(room, np.uint8), np.zeros(int(bands.max()) + 1, np.uint32)
        count = _compiled(kind)[1](old, new, bands, same, gaps, steps, band)
        room *= 3
    counts = np.bincount(band[:count], minlength=same.size).astype(np.uint32)
    order = np.argsort(band[:count], kind="stable")
    return Changes(counts, gaps[order], steps[order])


def apply(data: Array, kind: Kind, bands: Array, changes: Changes) -> bool:
    """Make old bits new ones, in place; False if the changes are not of such a tile."""
    ends = np.cumsum(changes.counts, dtype=np.int64)
    return bool(
        _compiled(kind)[2](data, bands, ends - changes.counts, ends, changes.gaps, changes.steps) == ends[-1]
    )


@cache
def _compiled(kind: Kind) -> tuple[Callable[..., Any], ...]:
    """Made for one type: with its shifts and masks as constants they are half as fast again.

    They call nothing of ours, or numba would not find them in its cache.
    """
    fraction, most, sign, whole = kind.fraction, kind.exponents - 1, kind.sign, (1 << kind.bits) - 1

    @njit(nogil=True, cache=True)
    def census(old: Array, new: Array, found: Array) -> None:
        for i in range(old.size):
            exponent = (old[i] >> fraction) & most
            found[0, exponent] += 1
            found[1, exponent] += old[i] != new[i]

    @njit(nogil=True, cache=True)
    def scan(
        old: Array, new: Array, bands: Array, same: Array, gaps: Array, steps: Array, band: Array
    ) -> int:
        """The number of changes; -1 if there is no room for them."""
        count = 0
        for i in range(old.size):
            b = bands[(old[i] >> fraction) & most]
            if old[i] == new[i]:
                same[b] += 1
                continue
            if count == gaps.size:
                return -1
            gaps[count] = same[b]
            same[b] = 0
            before, after = np.int64(old[i]), np.int64(new[i])
            before ^= whole if before & sign else sign
            after ^= whole if after & sign else sign
            step = (after - before) & whole
            steps[count] = ((2 * step) & whole) ^ (whole if 2 * step > whole else 0)
            band[count] = b
            count += 1
        return count

    @njit(nogil=True, cache=True)
    def apply(data: Array, bands: Array, begins: Array, ends: Array, gaps: Array, steps: Array) -> int:
        """How many changes found their element."""
        never = np.uint32(0xFFFFFFFF)
        upcoming = begins.copy()
        left = np.full(begins.size, never)  # elements of each band before its next change
        for b in range(begins.size):
            if begins[b] < ends[b]:
                left[b] = gaps[begins[b]]
        done = 0
        for i in range(data.size):
            b = bands[(data[i] >> fraction) & most]
            if left[b]:
                left[b] -= 1
                continue
            code, place = np.int64(steps[upcoming[b]]), np.int64(data[i])
            place ^= whole if place & sign else sign
            new = (place + ((code >> 1) ^ (whole if code & 1 else 0))) & whole
            if sign:
                new ^= sign if new & sign else whole
            data[i] = new
            upcoming[b] += 1
            left[b] = gaps[upcoming[b]] if upcoming[b] < ends[b] else never
            done += 1
        return done

    return census, scan, apply
