"""Where a model is cut: a tile is scanned, hashed and verified by itself; a group's tiles share streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Model

TILE = 1 << 20  # elements
PARTS = 8  # a tile in which much changes is cut into so many, for what is held of it to stay small
RUN = 32 << 20  # bytes: what one thread makes a group of, or several where much changes
LONGER = 4  # so many times that, where little changes: then what a group says of itself weighs more


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

    def cut(self, size: int) -> list[Tile]:
        """Tiles of so many elements, of the same run."""
        end = self.start + self.count
        return [Tile(self.tensor, at, min(size, end - at)) for at in range(self.start, end, size)]


TileHash = xxhash.xxh3_64
"""What a tile is recognised by. Against accidents: attackers are met by the names of chunks."""


def tile_hash(data: Array) -> int:
    """The hash of a tile's bits."""
    return TileHash(data.data).intdigest()


def tile_runs(model: Model, size: int) -> Iterator[tuple[str, list[Tile]]]:
    """All tiles of a model, by type and then by name, in runs of one type, of about so many bytes."""
    held: list[Tile] = []
    dtype, there = "", 0
    for name in sorted(model, key=lambda name: (model[name].dtype, name)):
        bits = model[name]
        for tile in Tile(name, 0, bits.data.size).cut(TILE):
            if held and (bits.dtype != dtype or there >= size):
                yield dtype, held
                held, there = [], 0
            dtype = bits.dtype
            held.append(tile)
            there += tile.count * bits.data.itemsize
    if held:
        yield dtype, held
