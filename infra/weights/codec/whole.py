"""Codes whole tiles: zstd of all bytes that hold exponents, then of all next bytes, and so on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.codec.zstd import by_frequency, unzstd
from infra.weights.weights_error import WeightsError


def pack_whole(tiles: Sequence[Array], kind: Kind) -> list[bytes]:
    """Return tiles as bytes, in pieces."""
    compressor = by_frequency()
    parts = [compressor.compress(plane) for data in tiles for plane in _planes(data, kind)]
    return [np.array([len(part) for part in parts], np.uint32).tobytes(), *parts]


class Tiles:
    """Unpacks the tiles that `pack_whole` has packed."""

    def __init__(self, data: memoryview, tiles: int, kind: Kind, what: str) -> None:
        self._data, self._kind, self._what = data, kind, what
        told = 4 * tiles * kind.bits // 8
        sizes = np.frombuffer(data[:told], np.uint32) if len(data) >= told else np.zeros(0, np.uint32)
        self._ends = np.concatenate([[told], told + np.cumsum(sizes, dtype=np.int64)])
        if not sizes.size or self._ends[-1] > len(data):
            raise WeightsError(f"{what} ends too soon")

    def tile(self, number: int, size: int) -> Array:
        """Return the tile with a number, of `size` elements."""
        kind, width = self._kind, self._kind.bits // 8
        found = np.empty(size, kind.unsigned)
        rows = found.view(np.uint8).reshape(size, width)
        for part in range(width):
            begin, end = self._ends[number * width + part : number * width + part + 2]
            rows[:, -1 - part] = np.frombuffer(unzstd(self._data[begin:end], size, self._what), np.uint8)
        if kind.sign:
            _turn(found, kind, kind.bits - 1)
        return found


def _planes(data: Array, kind: Kind) -> Iterator[bytes]:
    """Yield the first byte of all numbers, then the next. The sign goes last, so the exponent is the
    first."""
    if kind.sign:
        data = data.copy()
        _turn(data, kind, 1)
    for right in reversed(range(0, kind.bits, 8)):  # by shifts: taking a column of bytes is ten times slower
        yield (data >> data.dtype.type(right)).astype(np.uint8).tobytes()


def _turn(data: Array, kind: Kind, left: int) -> None:
    """Rotate the bits of each number to the left, in place."""
    right = data >> data.dtype.type(kind.bits - left)
    data <<= data.dtype.type(left)
    data |= right
