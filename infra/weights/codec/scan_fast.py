"""The compiled scan of one tile: stretch by stretch, each hashed while it is in the cache."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.codec import kernels
from infra.weights.codec.bands import MOST_BANDS, band_table
from infra.weights.codec.scan import Changes
from infra.weights.codec.tiles import TileHash

_ROW = MOST_BANDS + kernels.LINE // 8


def census(old: Array, new: Array, kind: Kind, every: int) -> Array:
    """Count elements, changes and the sum of steps, by old exponent, in one of `every` stretches."""
    found = np.zeros((3, kind.exponents), np.int64)
    kernels.census(old, new, *_numbers(kind), every, found)
    return found


def scan(old: Array, new: Array, kind: Kind, edges: Array, most: int) -> Changes | None:
    """Return the changes, band by band; None if there are more than `most`."""
    most, counts, room = min(most, old.size), np.zeros(MOST_BANDS, np.int64), _room()
    gaps, steps, bands = np.empty(most, np.uint32), np.empty(most, old.dtype), np.empty(most, np.uint8)
    found, before, after, behind = 0, TileHash(), TileHash(), (_behind(old), _behind(new))
    for start in range(0, old.size, kernels.STRETCH):
        end = min(start + kernels.STRETCH, old.size)
        before.update(old[start:end].data)
        after.update(new[start:end].data)
        found = kernels.scan(
            old, new, *behind, start, end, *_numbers(kind), *_tables(edges.tobytes()), room, gaps, steps,
            bands, counts, found,
        )  # fmt: skip
        if found < 0:
            return None
    ends = np.cumsum(counts)
    begins = ends - counts
    gaps, steps = kernels.by_band(bands[:found], begins.copy(), gaps, steps)
    begins, ends = begins[: edges.size], ends[: edges.size]
    return Changes(begins, ends, gaps, steps, before.intdigest(), after.intdigest())


def apply(data: Array, kind: Kind, edges: Array, changes: Changes) -> bool:
    """Turn old bits into new ones, in place. Returns False, and changes nothing, if they come out wrong."""
    total, room, upcoming, after = int(changes.counts.sum()), _room(), changes.begins.copy(), TileHash()
    some = np.flatnonzero(changes.counts)
    room[2] = kernels.NEVER
    room[2, some] = changes.gaps[upcoming[some]]
    places, was, behind, done = np.empty(total, np.uint32), np.empty(total, data.dtype), _behind(data), 0
    for start in range(0, data.size, kernels.STRETCH):
        end = min(start + kernels.STRETCH, data.size)
        done = kernels.apply(
            data, behind, start, end, *_numbers(kind), _tables(edges.tobytes())[0], room, upcoming,
            changes.ends, changes.gaps, changes.steps, places, was, done,
        )  # fmt: skip
        after.update(data[start:end].data)
    if done == total and after.intdigest() == changes.after:
        return True
    data[places[:done]] = was[:done]
    return False


def _numbers(kind: Kind) -> tuple[int, int, int, int]:
    return kind.fraction, kind.exponents - 1, kind.sign, (1 << kind.bits) - 1


@lru_cache(64)  # a group's tiles have the same bands
def _tables(edges: bytes) -> tuple[Array, Array]:
    """Return the highest exponent below each band, once for each element of a block; each exponent's band."""
    lowest = np.frombuffer(edges, np.uint8)
    floors = _aligned(MOST_BANDS * kernels.BLOCK, np.uint8)
    floors[:] = 255  # nothing is above
    floors[: lowest.size * kernels.BLOCK] = np.repeat(lowest - np.uint8(1), kernels.BLOCK)
    return floors, band_table(lowest)


def _behind(data: Array) -> Array:
    """Return the elements behind the last whole block, filled up with zeros to a block."""
    found = np.zeros(kernels.BLOCK, data.dtype)
    count = data.size % kernels.BLOCK
    found[:count] = data[data.size - count :]
    return found


def _room() -> Array:
    """Return a block's masks by band (all is above the first, nothing above the last), and two counts
    each."""
    room = _aligned(3 * _ROW, np.uint64).reshape(3, _ROW)
    room[:], room[0, 0] = 0, kernels.NEVER
    return room


def _aligned(size: int, dtype: type[np.unsignedinteger[Any]]) -> Array:
    """Return an array, not initialized, of which no vector lies in two lines of the cache."""
    raw = np.empty(size * dtype().itemsize + kernels.LINE, np.uint8)
    skip = -raw.ctypes.data % kernels.LINE
    return raw[skip : skip + size * dtype().itemsize].view(dtype)
