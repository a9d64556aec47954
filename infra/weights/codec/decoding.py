"""Decodes groups: turns old tiles into new ones, in place, and verifies each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Kind, Model, kind_of
from infra.weights.codec import rows, whole
from infra.weights.codec.bands import MOST_BANDS
from infra.weights.codec.groups import ROWED, SAME, WHOLE, Head
from infra.weights.codec.scan import Changes, Scan, scanner
from infra.weights.codec.streams import StreamsReader
from infra.weights.codec.tiles import TILE, Tile, tile_hash
from infra.weights.weights_error import WeightsError


class StaleTile(WeightsError):
    """A tile holds neither the old bits that a change is for nor the new ones."""


def decode_group(
    head: Head, body: memoryview, model: Model, what: str, *, scan: Scan | None = None
) -> Iterator[Tile]:
    """Turn old tiles into new ones, in place, and yield those that changed. `check_heads` has passed the
    head.

    A tile that does not become what it should is left as it was. A tile that is new already stays: after a
    crash the same groups are simply decoded again.
    """
    read = read_group(head, body, model, what)
    if isinstance(read, WholeTiles):
        yield from _replaced(read, model, what)
    else:
        yield from _changed(read, model, scan or scanner(), what)


def _replaced(read: WholeTiles, model: Model, what: str) -> Iterator[Tile]:
    for number, tile in enumerate(read.tiles):
        data = tile.of(model[tile.tensor])
        if tile_hash(data) == read.after[number]:
            continue
        if not _taken(data, read.full.tile(number, data.size), read.after[number]):
            raise wrong_tile(tile, what)
        yield tile


def _taken(data: Array, made: Array, expected: int) -> bool:
    if tile_hash(made) != expected:
        return False
    data[:] = made
    return True


class WholeTiles(NamedTuple):
    """A group's tiles, coded whole."""

    tiles: Sequence[Tile]
    after: Array  # hash of each
    full: whole.Tiles


class ChangedTiles(NamedTuple):
    """A group's tiles, and their changes: band by band, and tile by tile in each band."""

    tiles: Sequence[Tile]
    hashes: Array  # [old and new, tile]
    moving: Mapping[int, MovingRows]  # by tile number, of those coded by rows
    edges: Array  # lowest exponent of each band
    begins: Array  # [tile, band]: where the changes begin in gaps and steps
    ends: Array  # [tile, band]: where they end
    gaps: Array
    steps: Array

    def of_tiles(self) -> dict[int, Changes]:
        """Return the changes of each tile that has some, by the tile's number."""
        some = np.flatnonzero((self.ends > self.begins).any(axis=1)).tolist()
        ends = ((self.begins[number], self.ends[number]) for number in some)
        return {
            number: Changes(*mine, self.gaps, self.steps, *map(int, self.hashes[:, number]))
            for number, mine in zip(some, ends, strict=True)
        }


def _changed(read: ChangedTiles, model: Model, scan: Scan, what: str) -> Iterator[Tile]:
    """Change tiles first, then verify them: nearly all tiles are as expected, and need one hash only."""
    tiles, hashes, moving = read.tiles, read.hashes, read.moving
    changes, kind = read.of_tiles(), model[tiles[0].tensor].kind
    usual = [number for number in changes if number not in moving]
    applied = scan.apply(
        (tiles[number].of(model[tiles[number].tensor]) for number in usual), kind, read.edges,
        [changes[number] for number in usual],
    )  # fmt: skip
    for number, (tile, before, after) in enumerate(zip(tiles, *hashes.tolist(), strict=True)):
        data = tile.of(model[tile.tensor])
        if number in moving and number in changes:
            done = _apply_to_rows(data, moving[number], kind, read.edges, changes[number], scan)
        else:
            done = number in changes and next(applied)
        if done:
            yield tile
            continue
        found = tile_hash(data)
        if found != after:
            raise wrong_tile(tile, what) if found == before else stale_tile(tile, what)


def _apply_to_rows(
    data: Array, moving: MovingRows, kind: Kind, edges: Array, changes: Changes, scan: Scan
) -> bool:
    """Like `Scan.apply`, for those rows of a tile that change."""
    where = moving.tile, moving.row, moving.mask
    was = rows.picked(data, *where)
    made = was.copy()
    if not next(scan.apply([made], kind, edges, [replace(changes, after=moving.after)])):
        return False
    rows.put_rows(data, *where, made)
    if tile_hash(data) == changes.after:
        return True
    rows.put_rows(data, *where, was)
    return False


def wrong_tile(tile: Tile, what: str) -> WeightsError:
    """Return the error for a tile that does not become what its hash says."""
    return WeightsError(f"{what} is damaged: it makes other bits of {_place(tile)} than it says")


def stale_tile(tile: Tile, what: str) -> StaleTile:
    """Return the error for a tile that is neither the old nor the new one."""
    return StaleTile(f"{_place(tile)} holds other bits than those that {what} is for")


def _place(tile: Tile) -> str:
    return f"{tile.tensor}[{tile.start}:{tile.start + tile.count}]"


class MovingRows(NamedTuple):
    """A tile that is coded by rows."""

    tile: Tile
    row: int  # elements of a row
    mask: Array  # which rows change
    after: int  # the hash of the new bits of these rows


def _moving(
    body: memoryview, tiles: Sequence[Tile], model: Model, what: str
) -> tuple[dict[int, MovingRows], memoryview]:
    """Return, by tile number, the rows that change in tiles coded by rows; and the rest of the body."""
    reader = StreamsReader(body, what)
    flags = reader.numbers(len(tiles))
    numbers = np.flatnonzero(flags).tolist()
    lengths = [rows.row_of(model[tiles[number].tensor]) for number in numbers]
    if flags.size != len(tiles) or not all(lengths):
        raise WeightsError(f"{what} is damaged: it tells rows apart where there are none")
    counts = [rows.rows_in(tiles[number], row) for number, row in zip(numbers, lengths, strict=True)]
    sizes = [-(-count // 8) for count in counts]
    masks, rest = reader.numbers(sum(sizes)), reader.rest()
    if masks.size != sum(sizes) or masks.itemsize != 1 or len(rest) < 8 * len(numbers):
        raise WeightsError(f"{what} is damaged: it does not say which rows change")
    hashes = np.frombuffer(rest[: 8 * len(numbers)], np.uint64).tolist()
    found, at = {}, 0
    for number, row, count, size, after in zip(numbers, lengths, counts, sizes, hashes, strict=True):
        mask = np.unpackbits(masks[at : at + size], count=count).astype(np.bool_)
        found[number] = MovingRows(tiles[number], row, mask, after)
        at += size
    return found, rest[8 * len(numbers) :]


def read_group(head: Head, body: memoryview, model: Model, what: str) -> WholeTiles | ChangedTiles:
    """Read a group's bytes. Raises WeightsError if they are damaged."""
    tiles, kind = head.tiles(), kind_of(head.dtype)
    told = 8 * len(tiles) * (1 if head.mode == WHOLE else 2)
    hashes, body = np.frombuffer(body[:told], np.uint64).reshape(-1, len(tiles)), body[told:]
    if head.mode == WHOLE:
        return WholeTiles(tiles, hashes[0], whole.Tiles(body, len(tiles), kind, what))
    moving = dict[int, MovingRows]()
    if head.mode == ROWED:
        moving, body = _moving(body, tiles, model, what)
    told_changes = _nothing(len(tiles), kind) if head.mode == SAME else _read(body, tiles, kind, what)
    return ChangedTiles(tiles, hashes, moving, *told_changes)


_Told = tuple[Array, Array, Array, Array, Array]  # as the last fields of `ChangedTiles`


def _nothing(tiles: int, kind: Kind) -> _Told:
    none = np.zeros((tiles, 1), np.int64)
    return np.zeros(1, np.uint8), none, none, np.zeros(0, np.uint32), np.zeros(0, kind.unsigned)


def _read(body: memoryview, tiles: Sequence[Tile], kind: Kind, what: str) -> _Told:
    reader = StreamsReader(body, what)
    edges = reader.numbers(MOST_BANDS).astype(np.int64)
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
    return edges.astype(np.uint8), ends - counts, ends, gaps, steps
