"""Compiled loops over weights, each in one pass. Apart, because numba takes a second to import."""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from infra.weights.arrays import Array

_INFINITE = np.uint32(0x7F800000)  # in fp32, without the sign; NaN is beyond
_NAN = np.uint16(0x7FC0)


@njit(cache=True, nogil=True)
def to_bf16(source: Array, target: Array) -> None:
    """The bits of fp32 numbers to those of the nearest bf16 ones, of two the even one, as torch does."""
    for place in range(source.size):
        bits = source[place]
        even = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        target[place] = _NAN if bits & np.uint32(0x7FFFFFFF) > _INFINITE else rounded


@njit(cache=True, nogil=True)
def largest(data: Array, mask: int) -> int:
    """The largest of some integers, of which only the bits of a mask count."""
    found = mask & ~mask
    for place in range(data.size):
        found = max(found, data[place] & mask)
    return found
