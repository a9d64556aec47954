"""Where a model is cut: a tile is scanned, hashed and verified by itself; a group's tiles share streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from infra.weights.bits import Array, Bits, Model

TILE = 1 << 20  # elements
GROUP = 8 * TILE  # enough that what a group says of its streams costs little, few enough to hold what changes


@dataclass(frozen=True)
class Tile:
    """A run of a tensor's elements."""

    tensor: str
    start: int
    count: int

    def of(self, bits: Bits) -> Array:
        """Its part of the tensor: a view."""
        part: Array = bits.data[self.start : self.start + self.count]
        return part


def tile_hash(data: Array) -> int:
    """What a tile is recognised by. Against accidents: attackers are met by the names of chunks."""
    return xxhash.xxh3_64_intdigest(data.view(np.uint8).data)


def groups_of(model: Model) -> Iterator[tuple[str, list[Tile]]]:
    """All tiles of a model, by type and then by name, in groups of one type."""
    held: list[Tile] = []
    dtype, elements = "", 0
    for name in sorted(model, key=lambda name: (model[name].dtype, name)):
        bits = model[name]
        for start in range(0, bits.data.size, TILE):
            if held and (bits.dtype != dtype or elements >= GROUP):
                yield dtype, held
                held, elements = [], 0
            dtype = bits.dtype
            held.append(Tile(name, start, min(TILE, bits.data.size - start)))
            elements += held[-1].count
    if held:
        yield dtype, held
