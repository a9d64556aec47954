"""Compiled loops over weights, each in one pass. A module apart, because numba takes a second to import."""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from infra.weights.arrays import Array

_INFINITE = np.uint32(0x7F800000)  # fp32's infinity without the sign; NaNs are larger
_NAN = np.uint16(0x7FC0)


@njit(cache=True, nogil=True)
def to_bf16(source: Array, target: Array) -> None:
    """Convert bits of fp32 numbers to those of the nearest bf16 numbers; ties go to even, as in torch."""
    for place in range(source.size):
        bits = source[place]
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        target[place] = _NAN if bits & np.uint32(0x7FFFFFFF) > _INFINITE else rounded


@njit(cache=True, nogil=True)
def largest(data: Array, mask: int) -> int:
    """Return the largest of some integers, of which only the bits of a mask count."""
    found = mask & ~mask
    for place in range(data.size):
        found = max(found, data[place] & mask)
    return found
