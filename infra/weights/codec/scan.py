"""The scan of a tile finds which weights change, and by how much; `apply` makes these changes.

For each band, in the order of the tile's elements:

    gap   how many elements of the band stay as they are before one that changes
    step  by how many places that one moves in the order of numbers, as a small number for small moves
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from infra import choices
from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.weights_error import WeightsError

SCAN_VARIABLE = choices.SCAN.variable
SAMPLED = 1024  # elements of a stretch, which a census counts or skips


@dataclass(frozen=True)
class Changes:
    """The changes of one tile: those of a band are at begins : ends of gaps and steps."""

    begins: Array
    ends: Array
    gaps: Array  # uint32
    steps: Array  # as wide as the elements
    before: int  # hash of the old bits: scans hash them while they are at hand
    after: int  # hash of the new bits

    @property
    def counts(self) -> Array:
        """The number of changes in each band."""
        counts: Array = self.ends - self.begins
        return counts


@dataclass(frozen=True)
class Scan:
    """The three operations. `edges` are the lowest exponents of the bands.

    Tiles are worked on one by one as they are asked for.
    """

    census: Callable[[Array, Array, Kind, int], Array]
    """Count elements, changes and the sum of steps, by old exponent, in one of so many stretches."""
    scan: Callable[[Iterable[tuple[Array, Array]], Kind, Array, int], Iterator[Changes | None]]
    """Yield what changes in each tile; None, and no more, for the first with more changes than so many."""
    apply: Callable[[Iterable[Array], Kind, Array, Sequence[Changes]], Iterator[bool]]
    """Turn old bits into new ones, in place. Yields False for a tile that comes out wrong, and stays."""


def one_by_one(module: Any) -> Scan:
    """Return the scan of a module whose functions work on one tile."""

    def scan(
        pairs: Iterable[tuple[Array, Array]], kind: Kind, edges: Array, most: int
    ) -> Iterator[Changes | None]:
        for old, new in pairs:
            changes = module.scan(old, new, kind, edges, most)
            yield changes
            if changes is None:
                return

    def apply(tiles: Iterable[Array], kind: Kind, edges: Array, changes: Sequence[Changes]) -> Iterator[bool]:
        for tile, one in zip(tiles, changes, strict=True):
            yield module.apply(tile, kind, edges, one)

    return Scan(module.census, scan, apply)


def scanner(which: str | None = None) -> Scan:
    """Return a scan: `compiled` or `plain`. By default the settings say, else compiled if possible."""
    which = which or choices.SCAN.forced() or choices.NUMBA.forced() or ""
    return _scanner(which)


_MODULES = {"": "scan_fast", "compiled": "scan_fast", "plain": "scan_plain"}


@cache
def _scanner(which: str) -> Scan:
    try:
        module = import_module(f"{__package__}.{_MODULES[which]}")
    except ImportError as error:
        if which:
            raise WeightsError(f"{SCAN_VARIABLE}={which}: {error.name} is not installed") from error
        return _scanner("plain")
    return one_by_one(module)


@cache
def load_scanner(kind: Kind) -> None:
    """Load the code that applies changes, in a thread: it takes a second, and chunks can come meanwhile."""
    threading.Thread(target=_apply_nothing, args=(kind,), daemon=True, name="scanner").start()


def _apply_nothing(kind: Kind) -> None:
    nothing, edges = np.zeros(1, np.int64), np.zeros(1, np.uint8)
    none = np.zeros(0, np.uint32), np.zeros(0, kind.unsigned)
    with contextlib.suppress(Exception):  # a real call raises it again
        changes = Changes(nothing, nothing, *none, 0, 0)
        list(scanner().apply([np.zeros(1, kind.unsigned)], kind, edges, [changes]))
