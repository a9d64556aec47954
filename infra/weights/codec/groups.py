"""Tiles that share streams, and what they are in a chunk.

    banded   edges of the bands · changes by tile and band · of each band: gaps, steps
    rowed    which tiles have rows told apart · which of these change · hashes of those that do · as banded
    whole    of each tile its bytes: first all that hold the exponents, the others last
    same     nothing: the tiles are as they were

All are behind the hashes of the tiles' old bits (not if whole) and new bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from infra.weights.codec.tiles import TILE, Tile

SAME, BANDED, WHOLE, ROWED = range(4)


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A run of a tensor's elements, cut into tiles from its begin."""

    tensor: str
    start: int
    count: int


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What a group is."""

    dtype: str
    mode: int
    parts: int  # that its tiles are smaller than others
    spans: list[Span]
    size: int  # bytes of its body

    def tiles(self) -> list[Tile]:
        """Its tiles, in order. `covered.check_heads` says whether a model has them."""
        whole = (Tile(span.tensor, span.start, span.count) for span in self.spans)
        return [tile for span in whole for tile in span.cut(TILE // self.parts)]


@dataclass(frozen=True)
class CodedGroup:
    """A group, coded."""

    head: Head
    body: Sequence[bytes]  # in pieces, one behind the other


def group_of(
    dtype: str, mode: int, tiles: Sequence[Tile], body: Sequence[bytes], *, parts: int = 1
) -> CodedGroup:
    """A group of tiles; those of a tensor are neighbours."""
    spans = []
    for tensor, some in itertools.groupby(tiles, key=lambda tile: tile.tensor):
        mine = list(some)
        spans.append(Span(tensor, mine[0].start, sum(tile.count for tile in mine)))
    return CodedGroup(Head(dtype, mode, parts, spans, coded_size(body)), body)


def coded_size(body: Sequence[bytes]) -> int:
    """Bytes of all pieces."""
    return sum(map(len, body))
