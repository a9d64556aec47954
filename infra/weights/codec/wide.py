"""Packs many wide numbers, fast: high bits by how often each value occurs, low bits as they are.

    number ──► high bits, at most 254 ──► zstd ─────┐
          │    └─ more: 255, and the bits apart ────┼──► low bits of a number · bytes of zstd's · these
          └──► low bits: any is as likely as others ┘    · low bits · high bits of those that have more

So many bits are low that the high bits of the median number are 8 to 15: within one value of the high bits,
low bits are nearly noise. A coder that finds its own bins saves a few thousandths, and takes five times as
long.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from infra.weights.arrays import Array
from infra.weights.codec.zstd import by_frequency, unzstd
from infra.weights.weights_error import WeightsError

Unsigned = np.dtype[np.unsignedinteger[Any]]

_HEAD = struct.Struct("<BI")  # low bits of a number, bytes that zstd made
_MORE = 255  # stands for high bits that are kept apart
_KEPT = 4  # high bits of the median number
_LOOKED_AT = 1024  # numbers that are sampled for the median


def pack_wide(numbers: Array) -> bytes:
    """Pack numbers of one, two or four bytes."""
    low = max(0, _usual(numbers).bit_length() - _KEPT)
    high = numbers >> numbers.dtype.type(low)
    told = np.minimum(high, _MORE).astype(np.uint8)
    coded = by_frequency().compress(told.data)
    mask = numbers.dtype.type((1 << low) - 1)
    more = high[told == _MORE].astype("<u4")
    return b"".join([_HEAD.pack(low, len(coded)), coded, _low(numbers & mask, low), more.tobytes()])


def unpack(data: memoryview, dtype: Unsigned, count: int, what: str) -> Array:
    """Return `count` numbers of a type. Raises WeightsError if the data is damaged."""
    low, size = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (0, -1)
    end = _HEAD.size + size
    behind = end + -(-count // 8) * low
    if size < 0 or low >= 8 * dtype.itemsize or behind > len(data):
        raise WeightsError(f"{what} ends too soon")
    high = np.frombuffer(unzstd(data[_HEAD.size : end], count, what), np.uint8)
    places = np.flatnonzero(high == _MORE)
    if len(data) - behind != 4 * places.size:
        raise WeightsError(f"{what} is damaged: it does not say all of its large numbers")
    more = np.frombuffer(data[behind:], "<u4")
    if max(more.max(initial=0), high[high < _MORE].max(initial=0)) > np.iinfo(dtype).max >> low:
        raise WeightsError(f"{what} is damaged: its numbers are too large")
    found = _from_low(data[end:behind], low, count, dtype)
    high = high.astype(dtype)
    high[places] = more
    found |= high << dtype.type(low)
    return found


def _usual(numbers: Array) -> int:
    some = numbers[:: max(1, numbers.size // _LOOKED_AT)]
    return int(np.partition(some, some.size // 2)[some.size // 2]) if some.size else 0


def _low(numbers: Array, width: int) -> bytes:
    """Pack numbers of `width` bits: each eight of them take `width` bytes."""
    part = -(-numbers.size // 8)
    padded = np.zeros(8 * part, numbers.dtype)
    padded[: numbers.size] = numbers
    whole, rest = divmod(width, 8)
    found = _planes(padded, whole)
    if rest:  # the rest of eight numbers, which lie an eighth of all apart, shares a word
        top = (padded >> padded.dtype.type(8 * whole)).astype(np.uint64).reshape(8, part)
        found += _planes(sum(top[n] << np.uint64(rest * n) for n in range(8)), rest)
    return b"".join(found)


def _from_low(data: memoryview, width: int, count: int, dtype: Unsigned) -> Array:
    part = -(-count // 8)
    whole, rest = divmod(width, 8)
    found, split = np.zeros(8 * part, dtype), 8 * part * whole
    _add_planes(found, data[:split], whole)
    if rest:
        words, mask, top = np.zeros(part, np.uint64), np.uint64((1 << rest) - 1), found.reshape(8, part)
        _add_planes(words, data[split:], rest)
        for n in range(8):
            top[n] |= (words >> np.uint64(rest * n) & mask).astype(dtype) << dtype.type(8 * whole)
    return found[:count]


def _planes(numbers: Array, count: int) -> list[bytes]:
    """Return `count` bytes of each number: all lowest bytes, then all next ones, and so on."""
    return [(numbers >> numbers.dtype.type(8 * n)).astype(np.uint8).tobytes() for n in range(count)]


def _add_planes(numbers: Array, data: memoryview, count: int) -> None:
    for n, plane in enumerate(np.frombuffer(data, np.uint8).reshape(count, numbers.size)):
        numbers |= plane.astype(numbers.dtype) << numbers.dtype.type(8 * n)
