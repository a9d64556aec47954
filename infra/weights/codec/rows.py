"""Tensors of which few rows change, such as embeddings: only the rows that change are scanned and coded.

    tile, and which of its rows change ──► those rows, end to end ──► scan, apply ──► back to where they were

Otherwise each row that stays would make a long gap in each band. Whether it pays is found out tile by tile,
in tensors where a sample of rows says that it may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Bits
from infra.weights.codec.tiles import Tile

_LOOKED_AT = 256  # rows of a tensor that are sampled
_SHORTEST, _FEWEST = 64, 64  # elements of a row, rows of a tensor: fewer are not worth the look
MOST_MOVING = 0.5  # of all rows, and of the rows that changes at random places would touch: more do not pay


def row_of(bits: Bits) -> int:
    """Return the elements of a tensor's row; 0 if its rows are too short or too few to be worth a look."""
    rows = math.prod(bits.shape[:-1]) if len(bits.shape) > 1 else 0
    row = bits.size // rows if rows >= _FEWEST else 0
    return row if row >= _SHORTEST else 0


def may_pay(old: Bits, new: Bits) -> bool:
    """Whether no more than half of a sample of a tensor's rows change."""
    if not (row := row_of(new)):
        return False
    every = rows_apart(new, row)
    before, after = (bits.data.reshape(-1, row)[::every] for bits in (old, new))
    return bool((before != after).any(axis=1).mean() <= MOST_MOVING)


def rows_apart(bits: Bits, row: int) -> int:
    """Return how far apart the rows are that are sampled."""
    return -(-bits.size // row // _LOOKED_AT)


def moving(tile: Tile, row: int, before: Array, after: Array) -> Array | None:
    """Return which rows of a tile change; None if coding it by rows does not pay."""
    changed = np.flatnonzero(before != after)
    rows = np.unique((changed + tile.start % row) // row)
    count = rows_in(tile, row)
    if not rows_pay(rows.size, changed.size, count):
        return None
    found = np.zeros(count, np.bool_)
    found[rows] = True
    return found


def rows_pay(moving: int, changed: int, count: int) -> bool:
    """Whether it pays to code a tile by rows: so many of its `count` rows move, with so many changes."""
    return bool(0 < moving <= MOST_MOVING * count * -np.expm1(-changed / count))


def rows_in(tile: Tile, row: int) -> int:
    """Return how many rows a tile has a part of."""
    return (tile.start + tile.count - 1) // row - tile.start // row + 1


def picked(data: Array, tile: Tile, row: int, moving: Array) -> Array:
    """Return those rows of a tile that change, end to end."""
    return np.concatenate([part[mine].reshape(-1) for part, mine in parts_of_rows(data, tile, row, moving)])


def put_rows(data: Array, tile: Tile, row: int, moving: Array, made: Array) -> None:
    """Write rows back to where `picked` took them from."""
    at = 0
    for part, mine in parts_of_rows(data, tile, row, moving):
        some = int(np.count_nonzero(mine)), part.shape[1]
        part[mine] = made[at : at + math.prod(some)].reshape(some)
        at += math.prod(some)


def parts_of_rows(data: Any, tile: Tile, row: int, moving: Array) -> Iterator[tuple[Any, Array]]:
    """Yield views of a tile's rows, and which rows change: the end of a row, whole ones, the begin of one.

    `data`: an array, or a tensor on a GPU.
    """
    begin = min(-tile.start % row, tile.count)
    whole = (tile.count - begin) // row
    end, first = begin + whole * row, int(begin > 0)
    yield data[:begin].reshape(first, begin), moving[:first]
    yield data[begin:end].reshape(whole, row), moving[first : first + whole]
    yield data[end:].reshape(int(end < tile.count), tile.count - end), moving[first + whole :]
