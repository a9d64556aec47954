"""The scan of one tile: which weights change, by how much; and back.

Of each band, in the order of the tile's elements:

    gap   how many elements of the band stay as they are before this one, which doesn't
    step  by how many places it moves in the order of numbers, as a small number for small moves
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np

from infra import choices
from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.weights_error import WeightsError

SCAN_VARIABLE = choices.SCAN.variable
SAMPLED = 1024  # elements of a stretch that a census takes or leaves


@dataclass(frozen=True)
class Changes:
    """Of one tile, band by band: those of a band are at begins : ends of gaps and steps."""

    begins: Array
    ends: Array
    gaps: Array  # uint32
    steps: Array  # as wide as the elements
    before: int  # hashes of the tile: scans take them while they have its bits at hand
    after: int

    @property
    def counts(self) -> Array:
        """How many there are in each band."""
        counts: Array = self.ends - self.begins
        return counts


@dataclass(frozen=True)
class Scan:
    """The three things to be done with a tile. `edges` are the lowest exponents of the bands."""

    census: Callable[[Array, Array, Kind, int], Array]
    """By exponent of the old bits: elements, changes, the sum of their steps. Of one stretch in so many."""
    scan: Callable[[Array, Array, Kind, Array, int], Changes | None]
    """What changes; None if more than so many do."""
    apply: Callable[[Array, Kind, Array, Changes], bool]
    """Make old bits new ones, in place; False, and all is as it was, if they are not what they should be."""


def scanner(which: str | None = None) -> Scan:
    """What scans: `compiled`, `plain` or `cuda`; if nothing is said, compiled where there is numba."""
    which = which or choices.SCAN.forced() or choices.NUMBA.forced() or ""
    return _scanner(which)


_MODULES = {"": "scan_fast", "compiled": "scan_fast", "plain": "scan_plain", "cuda": "scan_gpu"}


@cache
def _scanner(which: str) -> Scan:
    try:
        module = import_module(f"{__package__}.{_MODULES[which]}")
    except ImportError as error:
        if which:
            raise WeightsError(f"{SCAN_VARIABLE}={which}: {error.name} is not installed") from error
        return _scanner("plain")
    return Scan(module.census, module.scan, module.apply)


@cache
def load_scanner(kind: Kind) -> None:
    """Have what applies changes loaded, in a thread: it takes a second, in which bytes can come already."""
    threading.Thread(target=_apply_nothing, args=(kind,), daemon=True, name="scanner").start()


def _apply_nothing(kind: Kind) -> None:
    nothing, edges = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    none = np.zeros(0, np.uint32), np.zeros(0, kind.unsigned)
    with contextlib.suppress(Exception):  # whoever has something to apply meets the same
        scanner().apply(np.zeros(1, kind.unsigned), kind, edges, Changes(nothing, nothing, *none, 0, 0))
