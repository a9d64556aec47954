"""How records and tensors lie in a step file.

record    u16 partition, u64 offset, u32 and u32 sizes of key and value, then both
tensor    its bits, or their distance to those of another tensor, byte by byte: first the lowest byte of all
          elements, then the next one of all, for the high bytes are alike and compress well
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import zstandard

from infra.bus import LARGEST_RECORD, Record
from infra.step_file.index import COUNTABLE, StepFileError
from infra.weights.bits import NAMES, Bits, kind_of, ordered, unordered

_RECORD = struct.Struct("<HQII")
_TRIED = 1 << 20  # bytes of a tensor by which its layout is chosen


def packed_records(records: Iterable[Record]) -> bytes:
    """Return records as bytes."""
    return b"".join(
        part
        for one in records
        for part in (
            _RECORD.pack(one.partition, one.offset, len(one.key), len(one.value)), one.key, one.value,
        )
    )  # fmt: skip


def unpacked_records(raw: bytes, topic: str, where: str) -> Iterator[Record]:
    """Yield the records in some bytes. Raises StepFileError."""
    at = 0
    while at < len(raw):
        if at + _RECORD.size > len(raw):
            raise StepFileError(f"{where}: the records of {topic} end in the middle of one")
        partition, offset, key, value = _RECORD.unpack_from(raw, at)
        at += _RECORD.size
        end = at + key + value
        if key + value > LARGEST_RECORD or end > len(raw):
            raise StepFileError(f"{where}: a record of {topic} has {key + value:,} bytes, which can't be")
        yield Record(topic, partition, offset, raw[at : at + key], raw[at + key : end])
        at = end


def _bits(bits: Bits) -> np.ndarray:
    """Return a tensor's elements as unsigned integers of their own width."""
    width = NAMES[bits.dtype][1]
    found: np.ndarray = bits.data.view(np.uint8).view(f"<u{width}")
    return found


def laid_out(bits: Bits, base: Bits | None) -> bytes:
    """Return a tensor's bytes as they are stored. `base`: the tensor from which its bits are counted."""
    values = _bits(bits)
    if base is not None:
        kind = kind_of(bits.dtype)
        values = ordered(values, kind) - ordered(_cast(base, bits.dtype), kind)
        sign = values.dtype.type(8 * values.itemsize - 1)
        values = (values << values.dtype.type(1)) ^ (np.zeros_like(values) - (values >> sign))  # zigzag
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).tobytes()


def restored(raw: bytes, dtype: str, shape: tuple[int, ...], base: Bits | None) -> Bits:
    """Return the tensor that was laid out as these bytes."""
    width = NAMES[dtype][1]
    bytes_ = np.frombuffer(raw, np.uint8).reshape(width, -1).T
    values = np.ascontiguousarray(bytes_).reshape(-1).view(f"<u{width}")
    if base is not None:
        one = values.dtype.type(1)
        values = (values >> one) ^ (np.zeros_like(values) - (values & one))
        values = unordered(values + ordered(_cast(base, dtype), kind_of(dtype)), kind_of(dtype))
    return Bits(dtype, shape, values.view(np.uint8).view(kind_of(dtype).unsigned))


def _cast(base: Bits, dtype: str) -> np.ndarray:
    """Return a tensor's elements as bits of another type, of a pair that `can_count` knows."""
    if base.dtype == dtype:
        return _bits(base)
    if (base.dtype, dtype) == ("F32", "BF16"):  # rounded as torch does it
        bits = _bits(base)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        return ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype("<u2")
    if (base.dtype, dtype) == ("F32", "F16"):
        with np.errstate(over="ignore", invalid="ignore"):
            narrow: np.ndarray = _bits(base).view("<f4").astype("<f2").view("<u2")
        return narrow
    if (base.dtype, dtype) == ("BF16", "F32"):
        return _bits(base).astype("<u4") << np.uint32(16)
    found: np.ndarray = _bits(base).view("<f2").astype("<f4").view("<u4")
    return found


def can_count(bits: Bits, base: Bits) -> bool:
    """Whether a tensor's bits can be counted from those of another one."""
    return base.shape == bits.shape and (base.dtype, bits.dtype) in COUNTABLE


def counting_pays(bits: Bits, base: Bits) -> bool:
    """Whether a tensor takes less room if it is counted from another one, by its beginning."""
    if not can_count(bits, base) or not bits.data.size:
        return False
    return _beginning(bits, base) < _beginning(bits, None)


def room_of(bits: Bits, base: Bits | None) -> float:
    """Return about how many bytes a tensor takes in a file, by its beginning.

    `base`: the tensor that its bits are counted from, if that takes less.
    """
    if not bits.data.size:
        return 0.0
    some = _beginning(bits, None)
    if base is not None and can_count(bits, base):
        some = min(some, _beginning(bits, base))
    return some * max(1.0, bits.data.nbytes / _TRIED)


def _beginning(bits: Bits, base: Bits | None) -> int:
    """Return how many bytes the beginning of a tensor takes once it is compressed."""
    some = _TRIED // NAMES[bits.dtype][1]
    mine, theirs = (
        None if one is None else Bits(one.dtype, (), _bits(one)[:some].view(kind_of(one.dtype).unsigned))
        for one in (bits, base)
    )
    assert mine is not None
    return len(zstandard.compress(laid_out(mine, theirs), 1))
