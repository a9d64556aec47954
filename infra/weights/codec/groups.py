"""Groups of tiles that share streams, and what they consist of in a chunk.

    banded   edges of the bands · number of changes by tile and band · of each band: gaps, steps
    rowed    which tiles are coded by rows · which of their rows change · hashes of these rows · as banded
    whole    the bytes of each tile: first those that hold the exponents, then the others
    same     nothing: the tiles are as they were

Before all that come the hashes of the tiles' old bits (not if whole) and new bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from infra.weights.codec.tiles import TILE, Tile

SAME, BANDED, WHOLE, ROWED = range(4)


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A range of a tensor's elements, cut into tiles from its begin."""

    tensor: str
    start: int
    count: int


class Head(msgspec.Struct, array_like=True, frozen=True):
    """The description of a group: how it is coded, and its tiles."""

    dtype: str
    mode: int
    parts: int  # how many times its tiles are smaller than `TILE`
    spans: list[Span]
    size: int  # bytes of its body

    def tiles(self) -> list[Tile]:
        """Return the group's tiles, in order. `covered.check_heads` checks that a model has them."""
        whole = (Tile(span.tensor, span.start, span.count) for span in self.spans)
        return [tile for span in whole for tile in span.cut(TILE // self.parts)]


@dataclass(frozen=True)
class CodedGroup:
    """A group's head, and its bytes."""

    head: Head
    body: Sequence[bytes]  # in pieces, which lie one behind the other


def group_of(
    dtype: str, mode: int, tiles: Sequence[Tile], body: Sequence[bytes], *, parts: int = 1
) -> CodedGroup:
    """Return a group of tiles. The tiles of a tensor must follow each other without gaps."""
    spans = []
    for tensor, some in itertools.groupby(tiles, key=lambda tile: tile.tensor):
        mine = list(some)
        spans.append(Span(tensor, mine[0].start, sum(tile.count for tile in mine)))
    return CodedGroup(Head(dtype, mode, parts, spans, coded_size(body)), body)


def coded_size(body: Sequence[bytes]) -> int:
    """Return the bytes of all pieces."""
    return sum(map(len, body))
