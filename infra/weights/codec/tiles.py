"""Cuts models into tiles: each is scanned, hashed and verified by itself. A group's tiles share streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Model

TILE = 1 << 20  # elements
PARTS = 8  # a tile in which much changes is cut into so many, to hold less in memory at once
RUN = 32 << 20  # bytes: one thread makes a group of them, or several where much changes
LONGER = 4  # where little changes, runs are so many times longer: so groups' heads weigh less


@dataclass(frozen=True)
class Tile:
    """A range of a tensor's elements."""

    tensor: str
    start: int
    count: int

    def of(self, bits: Bits) -> Array:
        """Return the tile's part of the tensor: a view, or a copy if it lies on a GPU."""
        return bits.part(self.start, self.count)

    def cut(self, size: int) -> list[Tile]:
        """Return the tiles of `size` elements, of which the last may have fewer, that make up this one."""
        end = self.start + self.count
        return [Tile(self.tensor, at, min(size, end - at)) for at in range(self.start, end, size)]


TileHash = xxhash.xxh3_64
"""The hash that tells a tile's bits. It finds accidents; the hashes that name chunks find attackers."""


def tile_hash(data: Array) -> int:
    """Return the hash of a tile's bits."""
    return TileHash(data.data).intdigest()


def tile_runs(model: Model, size: int) -> Iterator[tuple[str, list[Tile]]]:
    """Yield a model's tiles, by type and then by name, in runs of one type and of about `size` bytes."""
    held: list[Tile] = []
    dtype, there = "", 0
    for name in sorted(model, key=lambda name: (model[name].dtype, name)):
        bits = model[name]
        for tile in Tile(name, 0, bits.size).cut(TILE):
            if held and (bits.dtype != dtype or there >= size):
                yield dtype, held
                held, there = [], 0
            dtype = bits.dtype
            held.append(tile)
            there += tile.count * bits.kind.bits // 8
    if held:
        yield dtype, held
