"""Routes in messages: the experts that each layer of a mixture of experts took for each token.

    0   u8          bytes of an expert's number: 1 up to 256 experts, else 2
    1   u16         layers that have experts
    3   u16         experts that such a layer takes for a token
    5   zstd frame  numbers, [tokens, layers, experts taken]

A token's experts of a layer are a set, which travels in ascending order, each number as the difference to the
one before: so zstd makes random routes of 8 of 128 experts a third smaller. No token was drawn behind an
answer's last one, so that has no route: a sample has routes of one token fewer than prompt and answer have.

Nothing is unpacked before its size is known to be the right one.
"""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

_HEAD = struct.Struct("<BHH")
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2")}
_NARROW = 256  # experts that one byte tells apart
_LEVEL = 1  # higher ones save nothing
_OVERHEAD = 256  # bytes of a frame around its numbers, and of each block of 128 KiB: mostly tables of codes
_BLOCK = 128 << 10  # bytes
_LOOSE = 1.05  # zstd takes so many times what the entropy of its bytes asks for
_own = threading.local()  # neither a compressor nor a decompressor may be used by two threads at once


class BadRoutes(ValueError):
    """Routes can't be those of a sample; the message says why."""


@dataclass(frozen=True)
class RouteShape:
    """The shape of a model's routes."""

    layers: int  # that have experts
    taken: int  # experts that such a layer takes for a token
    experts: int  # that it has

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest type that holds an expert's number."""
        return _TYPES[1 if self.experts <= _NARROW else 2]

    def most_bytes(self, tokens: int) -> int:
        """Return how many bytes the packed routes of so many tokens can have, whatever the routes are."""
        numbers = tokens * self.layers * self.taken
        each: float = self.dtype.itemsize
        if each == 1:
            # The differences of a layer are at least 0 and sum up to less than its experts. Of all such
            # numbers those that fall off geometrically have most entropy.
            mean = (self.experts - 1) / self.taken
            bits = (mean + 1) * math.log2(mean + 1) - mean * math.log2(mean) if mean else 0.0
            each = min(each, _LOOSE * max(1.0, bits) / 8)
        return _HEAD.size + _OVERHEAD + math.ceil(numbers * (each + _OVERHEAD / _BLOCK))


def pack_routes(routes: np.ndarray) -> bytes:
    """Return routes as messages have them. `routes`: unsigned [tokens, layers, experts taken], ascending."""
    differences = routes.copy()
    differences[..., 1:] -= routes[..., :-1]
    head = _HEAD.pack(routes.dtype.itemsize, *routes.shape[1:])
    if not hasattr(_own, "pack"):
        _own.pack = zstandard.ZstdCompressor(level=_LEVEL)
    packed: bytes = _own.pack.compress(np.ascontiguousarray(differences, _TYPES[routes.dtype.itemsize]))
    return head + packed


def routed_tokens(packed: bytes) -> int:
    """Return how many tokens some packed routes are of, as they say themselves. Raises BadRoutes."""
    return _opened(packed)[2]


def unpack_routes(packed: bytes, tokens: int) -> np.ndarray:
    """Return the routes of so many tokens, [tokens, layers, experts taken]. Raises BadRoutes."""
    kind, shape, found = _opened(packed)
    if found != tokens:
        raise BadRoutes(f"it has routes of {found} tokens; {tokens} are expected")
    if not hasattr(_own, "unpack"):
        _own.unpack = zstandard.ZstdDecompressor()
    try:
        plain = _own.unpack.decompress(memoryview(packed)[_HEAD.size :], allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise BadRoutes(f"its routes can't be unpacked: {str(error)[:200]}") from None
    differences = np.frombuffer(plain, kind).reshape(tokens, *shape)
    if shape[1] > 1 and differences[..., 1:].min(initial=1) < 1:
        raise BadRoutes("its routes name an expert twice for one token and layer, or are out of order")
    routes = np.add.accumulate(differences, axis=-1, dtype=kind)
    if (routes < differences).any():  # such a sum is beyond the type
        raise BadRoutes("its routes name an expert whose number is too large")
    return routes


def wrong_routes(packed: bytes, tokens: int, shape: RouteShape | None) -> str:
    """Return why packed routes are not those of so many tokens of a model; empty if they are.

    `shape`: None if the trainer follows no routes; then there may be none.
    """
    if shape is None:
        return "it has routes, and this run's trainer follows none" if packed else ""
    if not packed:
        return (
            "it has no routes (the experts that each layer took), and this run's trainer follows them: its "
            "engine recorded none, or model.follow_routes should be false"
        )
    try:
        kind, said, _ = _opened(packed)
        if (kind, said) != (shape.dtype, (shape.layers, shape.taken)):
            return (
                f"its routes are of {said[0]} layers with {said[1]} experts a token; this model has "
                f"{shape.layers} with {shape.taken}"
            )
        routes = unpack_routes(packed, tokens)
    except BadRoutes as error:
        return str(error)
    if (most := int(routes[..., -1].max(initial=0))) >= shape.experts:
        return f"its routes name expert {most}; the model has {shape.experts}"
    return ""


def _opened(packed: bytes) -> tuple[np.dtype[Any], tuple[int, int], int]:
    """Return the type, the shape of a token's routes, and the number of tokens, without unpacking them."""
    try:
        width, layers, taken = _HEAD.unpack_from(packed)
        size = zstandard.frame_content_size(memoryview(packed)[_HEAD.size :])
    except (struct.error, zstandard.ZstdError) as error:
        raise BadRoutes(f"its routes can't be read: {str(error)[:200]}") from None
    if width not in _TYPES or not layers or not taken:
        raise BadRoutes(f"its routes are of {layers} layers with {taken} experts of {width} bytes each")
    tokens, rest = divmod(size, width * layers * taken)
    if size < 0 or rest:
        raise BadRoutes(f"its routes have {size} bytes, which are no whole number of tokens")
    return _TYPES[width], (layers, taken), tokens
