"""The scan of one tile: which weights change, by how much; and back.

Of each band, in the order of the tile's elements:

    gap   how many elements of the band stay as they are before this one, which doesn't
    step  by how many places it moves in the order of numbers, as a small number for small moves
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from infra.weights.bits import Array, Kind


@dataclass(frozen=True)
class Changes:
    """Of one tile, one band behind the other."""

    counts: Array  # of changes, by band
    gaps: Array  # uint32
    steps: Array  # as wide as the elements


@dataclass(frozen=True)
class Scan:
    """The three things to be done with a tile."""

    census: Callable[[Array, Array, Kind], Array]  # by exponent of the old bits: elements, and changes
    scan: Callable[[Array, Array, Kind, Array], Changes]
    apply: Callable[[Array, Kind, Array, Changes], bool]  # in place; False if they are not of such a tile


@cache
def scanner(*, compiled: bool = True) -> Scan:
    """The compiled one, where there is numba."""
    try:
        if compiled:
            from infra.weights.codec import scan_fast

            return Scan(scan_fast.census, scan_fast.scan, scan_fast.apply)
    except ImportError:
        pass
    from infra.weights.codec import scan_plain

    return Scan(scan_plain.census, scan_plain.scan, scan_plain.apply)
