"""Bytes as a liar, or a broken disk, would have them: good ones, changed in ways that readers trip over."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_WORD = re.compile(rb'"[^"\\]*"')
_LIES = (
    b"-1", b"0", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""', b"true", b"1.5", b"18446744073709551616",
    b"9" * 400, b"9" * 5000, b"-9223372036854775809", b"[" * 2000, b'{"a":' * 2000, b'"\\ud800"',
    b'"\\u0000"',
)  # fmt: skip
_EDGES = (
    b"\x00" * 4, b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x80", b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7, b"\xcb\x7f\xf8" + b"\x00" * 6, b"\x91" * 3000, b"\x81\xa1a" * 1000, b"\xc1",
    b"\xa1\xff", b"\xc0", b"\x90", b"\x80",
)  # fmt: skip


def mutated(good: Sequence[bytes], draw: np.random.Generator) -> bytes:
    """One of some good inputs, changed once or several times."""
    data = good[int(draw.integers(len(good)))]
    for _ in range(int(draw.geometric(0.7))):
        data = _WAYS[draw.integers(len(_WAYS))](data, draw)
    return data


def _bits(data: bytes, draw: np.random.Generator) -> bytes:
    found = bytearray(data)
    for _ in range(draw.integers(1, 9)):
        if found:
            found[draw.integers(len(found))] ^= 1 << int(draw.integers(8))
    return bytes(found)


def _bytes(data: bytes, draw: np.random.Generator) -> bytes:
    at = _place(data, draw)
    some = draw.integers(0, 256, draw.integers(1, 9), np.uint8).tobytes()
    return data[:at] + some + data[at + len(some) :]


def _cut(data: bytes, draw: np.random.Generator) -> bytes:
    return data[: _place(data, draw)]


def _gap(data: bytes, draw: np.random.Generator) -> bytes:
    at = _place(data, draw)
    return data[:at] + data[at + int(draw.integers(1, 65)) :]


def _again(data: bytes, draw: np.random.Generator) -> bytes:
    """A part of it once more, somewhere."""
    begin, to = _place(data, draw), _place(data, draw)
    part = data[begin : begin + int(draw.integers(1, 257))]
    return data[:to] + part * int(draw.choice([1, 1, 1, 2, 50])) + data[to:]


def _edge(data: bytes, draw: np.random.Generator) -> bytes:
    at, edge = _place(data, draw), _EDGES[draw.integers(len(_EDGES))]
    return data[:at] + edge + data[at + (len(edge) if draw.random() < 0.7 else 0) :]


def _lie(data: bytes, draw: np.random.Generator) -> bytes:
    """Another number, or no number, where a number or a word stands in text."""
    pattern = _NUMBER if draw.random() < 0.7 else _WORD
    at = _place(data, draw)
    found = pattern.search(data, at) or pattern.search(data)
    if found is None:
        return _edge(data, draw)
    return data[: found.start()] + _LIES[draw.integers(len(_LIES))] + data[found.end() :]


def _place(data: bytes, draw: np.random.Generator) -> int:
    """Anywhere; the first bytes, which say what follows, more often."""
    most = len(data) if draw.random() < 0.8 else min(len(data), 64)
    return int(draw.integers(most + 1))


_WAYS: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
    _bits, _bits, _bytes, _cut, _gap, _again, _edge, _edge, _lie, _lie,
)  # fmt: skip
