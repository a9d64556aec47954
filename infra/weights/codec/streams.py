"""Packs integers into streams of bytes, and unpacks them. A stream names its coder: a reader needs no
settings.

pcodec finds bins of numbers, and codes them as small as an entropy coder would. zstd replaces it where pcodec
is not installed, and where there are too few numbers for bins to pay. Where much changes there are too many
numbers for pcodec, and `wide` codes them. Numbers are as wide as the largest one needs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import zstandard

from infra.weights.arrays import Array
from infra.weights.codec import wide
from infra.weights.codec.zstd import unzstd
from infra.weights.weights_error import WeightsError

_HEAD = struct.Struct("<BII")  # coder and bytes of a number; count of numbers; bytes that follow
_RAW, _ZSTD, _PCODEC, _WIDE = range(4)
_FEW = 2048  # numbers: for fewer, bins may cost more than they save
_LEVEL = 7  # of pcodec: up to 128 bins. With twice as many it is slower, and saves a thousandth
_PAGE = 1 << 16  # numbers that pcodec works on at once, with some twenty bytes of memory for each
_ZSTD_LEVEL = 1


@cache
def _pcodec() -> Any:
    try:
        import pcodec
    except ImportError:
        return None
    return pcodec


@cache
def _config() -> Any:
    library = _pcodec()
    # Neighbouring numbers are unrelated: pcodec need not look for differences between them.
    return library.ChunkConfig(
        compression_level=_LEVEL, mode_spec=library.ModeSpec.classic(), enable_8_bit=True,
        delta_spec=library.DeltaSpec.no_op(), paging_spec=library.PagingSpec.equal_pages_up_to(_PAGE),
    )  # fmt: skip


def pack_streams(*parts: Array, fast: bool = False) -> bytes:
    """Pack the numbers of several arrays, end to end, into a stream. `fast`: for very many numbers."""
    numbers, options, library = _joined(parts), [], _pcodec()
    if fast and numbers.size >= _FEW:
        options.append((_WIDE, wide.pack_wide(numbers)))
    else:
        if library is None or numbers.size < _FEW:
            options.append((_ZSTD, zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(_planes(numbers))))
        if library is not None and numbers.size:
            options.append((_PCODEC, library.standalone.simple_compress(numbers, _config())))
    coder, data = min(options, key=lambda option: len(option[1]))
    if len(data) >= numbers.nbytes:
        coder, data = _RAW, numbers.tobytes()
    return _HEAD.pack(coder << 4 | numbers.itemsize, numbers.size, len(data)) + data


def _joined(parts: Sequence[Array]) -> Array:
    joined = np.concatenate(parts)
    return joined.astype(np.min_scalar_type(int(joined.max())) if joined.size else np.uint8, copy=False)


class StreamsReader:
    """Reads streams that lie one behind the other."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self._data, self._at, self._what = memoryview(data), 0, what

    def numbers(self, most: int) -> Array:
        """Return the next stream's numbers. Raises WeightsError if there are more than `most`."""
        try:
            code, count, size = _HEAD.unpack_from(self._data, self._at)
        except struct.error:
            raise WeightsError(f"{self._what} ends too soon") from None
        coder, width = code >> 4, code & 15
        start = self._at + _HEAD.size
        self._at = start + size
        if width not in (1, 2, 4) or count > most or self._at > len(self._data):
            raise WeightsError(
                f"{self._what} is damaged: it holds a stream of {count} numbers; {most} are the most"
            )
        return self._decoded(coder, np.dtype(f"<u{width}"), count, self._data[start : self._at])

    def rest(self) -> memoryview:
        """Return the bytes behind the last stream that was read."""
        return self._data[self._at :]

    def _decoded(self, coder: int, dtype: np.dtype[Any], count: int, data: memoryview) -> Array:
        if coder == _ZSTD:
            return _from_planes(unzstd(data, count * dtype.itemsize, self._what), dtype)
        if coder == _RAW and len(data) == count * dtype.itemsize:
            return np.frombuffer(data, dtype)
        if coder == _WIDE:
            return wide.unpack(data, dtype, count, self._what)
        library = _pcodec()
        if coder != _PCODEC or library is None:
            raise WeightsError(
                f"{self._what} is coded with pcodec, which is not installed: pip install pcodec"
                if coder == _PCODEC
                else f"{self._what} is damaged: there is no coder {coder} of {len(data)} bytes"
            )
        found = np.empty(count, dtype)
        try:
            done = library.standalone.simple_decompress_into(bytes(data), found)
        except BaseException as error:  # pcodec's have no common base; a panic is not even an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise WeightsError(f"{self._what} is damaged: {error}") from error
        if not done.finished or done.n_processed != count:
            raise WeightsError(f"{self._what} is damaged: a stream does not have {count} numbers")
        return found


def _planes(numbers: Array) -> bytes:
    """Return all lowest bytes, then all next ones, and so on: so zstd sees bytes that are alike."""
    return np.ascontiguousarray(numbers.view(np.uint8).reshape(numbers.size, numbers.itemsize).T).tobytes()


def _from_planes(data: bytes, dtype: np.dtype[Any]) -> Array:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    found: Array = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
    return found
