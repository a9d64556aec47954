"""Groups to tiles: old tiles become new ones in place, and each is verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infra.weights.bits import Array, Kind, Model, kind_of
from infra.weights.codec import whole
from infra.weights.codec.bands import MOST
from infra.weights.codec.groups import BANDED, WHOLE, Head
from infra.weights.codec.scan import Changes, Scan, scanner
from infra.weights.codec.streams import Reader
from infra.weights.codec.tiles import TILE, Tile, tile_hash
from infra.weights.errors import WeightsError


class StaleTile(WeightsError):
    """A tile holds neither the bits that a change is for nor those that it makes."""


def decode_group(
    head: Head, body: memoryview, model: Model, what: str, *, scan: Scan | None = None
) -> Iterator[Tile]:
    """Make old tiles new ones, in place; yields those that were changed. The head was checked before.

    A tile that does not become what it should is left as it was. One that is new already stays: after a crash
    the same groups are simply decoded again.
    """
    tiles, kind = head.tiles(), kind_of(head.dtype)
    told = 8 * len(tiles) * (1 if head.mode == WHOLE else 2)
    hashes = np.frombuffer(body[:told], np.uint64).reshape(-1, len(tiles))
    if head.mode == WHOLE:
        yield from _replaced(tiles, model, hashes[0], whole.Tiles(body[told:], len(tiles), kind, what), what)
        return
    changes = _read(body[told:], tiles, kind, what) if head.mode == BANDED else None
    yield from _changed(tiles, model, hashes, changes, scan or scanner(), what)


def _replaced(
    tiles: Sequence[Tile], model: Model, after: Array, full: whole.Tiles, what: str
) -> Iterator[Tile]:
    for number, tile in enumerate(tiles):
        data = tile.of(model[tile.tensor])
        if tile_hash(data) == after[number]:
            continue
        if not _taken(data, full.tile(number, data.size), after[number]):
            raise _damaged(tile, what)
        yield tile


def _taken(data: Array, made: Array, expected: int) -> bool:
    if tile_hash(made) != expected:
        return False
    data[:] = made
    return True


class _Read(NamedTuple):
    edges: Array  # of the bands
    begins: Array  # of each tile's changes of each band, in gaps and steps
    ends: Array
    gaps: Array
    steps: Array


def _changed(
    tiles: Sequence[Tile], model: Model, hashes: Array, read: _Read | None, scan: Scan, what: str
) -> Iterator[Tile]:
    """Changed first, then verified: nearly always it was what it is taken for, and one hash is enough."""
    for number, (tile, before, after) in enumerate(zip(tiles, *hashes.tolist(), strict=True)):
        bits = model[tile.tensor]
        data = tile.of(bits)
        if read is not None and (read.ends[number] > read.begins[number]).any():
            mine = Changes(read.begins[number], read.ends[number], read.gaps, read.steps, before, after)
            if scan.apply(data, bits.kind, read.edges, mine):
                yield tile
                continue
        found = tile_hash(data)
        if found == after:
            continue
        if found == before:
            raise _damaged(tile, what)
        raise StaleTile(f"{_place(tile)} holds other bits than those that {what} is for")


def _damaged(tile: Tile, what: str) -> WeightsError:
    return WeightsError(f"{what} is damaged: it makes other bits of {_place(tile)} than it says")


def _place(tile: Tile) -> str:
    return f"{tile.tensor}[{tile.start}:{tile.start + tile.count}]"


def _read(body: memoryview, tiles: Sequence[Tile], kind: Kind, what: str) -> _Read:
    reader = Reader(body, what)
    edges = reader.numbers(MOST).astype(np.int64)
    if not edges.size or edges[0] or (np.diff(edges) <= 0).any() or edges[-1] >= kind.exponents:
        raise WeightsError(f"{what} is damaged: its bands are not of this type's exponents")
    counts = reader.numbers(len(tiles) * edges.size).astype(np.int64)
    if counts.size != len(tiles) * edges.size or counts.sum() > min(TILE, sum(tile.count for tile in tiles)):
        raise WeightsError(f"{what} is damaged: it does not say how many elements of each tile change")
    counts = counts.reshape(len(tiles), edges.size)
    of_band = counts.sum(axis=0)
    ends = np.cumsum(of_band) - of_band + np.cumsum(counts, axis=0)
    gaps, steps = np.empty(of_band.sum(), np.uint32), np.empty(of_band.sum(), kind.unsigned)
    at = 0
    for count in of_band.tolist():
        for numbers in (gaps, steps):
            found = reader.numbers(count)
            if found.size != count or found.itemsize > numbers.itemsize:
                raise WeightsError(f"{what} is damaged: its streams are not as long as it says")
            numbers[at : at + count] = found
        at += count
    return _Read(edges.astype(np.uint8), ends - counts, ends, gaps, steps)
