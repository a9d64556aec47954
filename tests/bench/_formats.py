"""How others send what changed in bf16 weights, as their code or their papers describe it.

Each is bytes there, and old weights made new ones in place: what is compared can be decoded. None verifies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zstandard

from infra.weights.arrays import Array

_LEVEL = 1


@dataclass(frozen=True)
class Format:
    """One way."""

    encode: Callable[[Array, Array], bytes]
    decode: Callable[[Array, bytes], None]  # in place


def _zstd(data: bytes | Array) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data if isinstance(data, bytes) else data.data)


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _index_value(old: Array, new: Array) -> bytes:
    where = np.flatnonzero(old != new).astype(np.int32)
    return where.tobytes() + new[where].tobytes()


def _from_index_value(held: Array, data: bytes) -> None:
    count = len(data) // 6
    held[np.frombuffer(data, np.int32, count)] = np.frombuffer(data, np.uint16, count, 4 * count)


def _xor(old: Array, new: Array) -> bytes:
    return _zstd(old ^ new)


def _from_xor(held: Array, data: bytes) -> None:
    held ^= np.frombuffer(_unzstd(data), np.uint16)


def _gaps(old: Array, new: Array) -> tuple[Array, Array]:
    """Where elements change, as distances that fit 16 bits: a longer one is told by elements that stay."""
    where = np.flatnonzero(old != new)
    last = np.concatenate([[-1], where[:-1]])
    far = [np.arange(a + 65535, b, 65535) for a, b in zip(last, where, strict=True) if b - a > 65535]
    if far:
        where = np.sort(np.concatenate([where, *far]))
    return where, np.diff(where, prepend=-1).astype(np.uint16)


def _gap_value(old: Array, new: Array) -> bytes:
    where, gaps = _gaps(old, new)
    return _zstd(gaps.tobytes() + new[where].tobytes())


def _from_gap_value(held: Array, data: bytes) -> None:
    both = np.frombuffer(_unzstd(data), np.uint16).reshape(2, -1)
    held[np.cumsum(both[0].astype(np.int64)) - 1] = both[1]


def _gap_xor(old: Array, new: Array) -> bytes:
    where, gaps = _gaps(old, new)
    return _zstd(gaps.tobytes() + (old[where] ^ new[where]).tobytes())


def _from_gap_xor(held: Array, data: bytes) -> None:
    both = np.frombuffer(_unzstd(data), np.uint16).reshape(2, -1)
    held[np.cumsum(both[0].astype(np.int64)) - 1] ^= both[1]


FORMATS = {
    "int32_bf16": Format(_index_value, _from_index_value),  # TRL's blog, vLLM's sparse updates
    "u16gap_bf16_zstd": Format(_gap_value, _from_gap_value),  # PULSE
    "xor_zstd": Format(_xor, _from_xor),  # slime, SkyRL, ModelExpress
    "u16gap_xor_zstd": Format(_gap_xor, _from_gap_xor),  # NeMo-RL
}
