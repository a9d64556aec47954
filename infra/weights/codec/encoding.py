"""Encodes tiles as groups, each in the smallest way: banded, in as many bands as pay, or whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Kind, Model, kind_of
from infra.weights.codec import rows, streams, whole
from infra.weights.codec.bands import band_edges
from infra.weights.codec.groups import BANDED, ROWED, SAME, WHOLE, CodedGroup, coded_size, group_of
from infra.weights.codec.scan import Changes, Scan, scanner
from infra.weights.codec.tiles import LONGER, PARTS, RUN, TILE, Tile, tile_hash

_SAMPLE = 1 << 16  # elements of a run that are sampled to choose its bands
_LOOKED_AT = 1 << 18  # elements of a model that are sampled to choose the size of its runs
_SPARSE = 0.01  # of the elements change: then a run of the usual size has changes enough
_LARGE = 0.3  # of the tiles' bytes: whole tiles never need less, as far as is known
_DENSE, _WIDE = 0.5, 32  # if more of the elements change, of so many bits, `wide` codes them
_STRETCH, _ONE_IN = 1 << 13, 16  # the size of whole tiles is estimated from one in so many stretches
_SURELY = 0.9  # of this estimate: whole tiles never need less


def run_size(old: Model | None, new: Model) -> int:
    """Return the bytes of a run: more where little changes, going by a sample of each tensor."""
    if old is None:
        return RUN
    every = sampled_every(new)
    pairs = [(old[name].data[::every], new[name].data[::every]) for name in new]
    changed = sum(int((before != after).sum()) for before, after in pairs)
    return run_bytes(changed, sum(before.size for before, _ in pairs))


def sampled_every(model: Model) -> int:
    """Return how far apart the elements of a model are that are sampled."""
    return sum(bits.size for bits in model.values()) // _LOOKED_AT | 1


def run_bytes(changed: int, sampled: int) -> int:
    """Return the bytes of a run, if so many elements of a sample change."""
    most = _SPARSE * sampled
    return RUN * next((times for times in (LONGER, LONGER // 2) if changed * times <= most), 1)


class Scanned(NamedTuple):
    """The changes of a tile."""

    tile: Tile
    changes: Changes
    moving: Array | None  # which rows change; None: the tile is not coded by rows
    inner: int  # hash of these rows' new bits


Look = Callable[[Kind, Sequence[Tile], int], tuple[Array, Iterator[Scanned | None]]]
"""Looks at a run: returns its bands, and yields what changes in each tile; None, and no more, for the first
with more changes than so many."""


def encode_run(
    dtype: str, tiles: Sequence[Tile], old: Model | None, new: Model, look: Look | None = None,
    *, parts: int = 1,
) -> Iterator[CodedGroup]:  # fmt: skip
    """Yield the groups that make a run's tiles of old ones, or of nothing (None).

    Tiles in which much changes are cut; `parts` is into how many.
    """
    kind = kind_of(dtype)
    if old is None:
        after = [tile.of(new[tile.tensor]) for tile in tiles]
        hashes = _told([tile_hash(data) for data in after])
        yield group_of(dtype, WHOLE, tiles, [hashes, *whole.pack_whole(after, kind)])
        return
    look, small = look or _look_at(old, new), TILE // PARTS
    edges, every = look(kind, tiles, small)
    room = TILE * kind.bits // (32 + kind.bits)  # changes that are held: no more bytes than a tile
    held: list[Scanned] = []
    for number, one in enumerate(every):
        if held and (one is None or _count(held) + one.changes.gaps.size > room):
            yield _group(dtype, held, edges, parts, new)
        if one is None:
            rest = [part for tile in tiles[number:] for part in tile.cut(small)]
            yield from encode_run(dtype, rest, old, new, look, parts=PARTS)
            return
        held.append(one)
    yield _group(dtype, held, edges, parts, new)


def _look_at(old: Model, new: Model) -> Look:
    """Return how to look at runs of two models in main memory."""
    scan = scanner()

    def look(kind: Kind, tiles: Sequence[Tile], most: int) -> tuple[Array, Iterator[Scanned | None]]:
        looked = list(_looked(tiles, old, new))
        edges = _edges(looked, kind, scan)
        every = scan.scan((one.scanned() for one in looked), kind, edges, most)
        pairs = zip(looked, every, strict=False)
        return edges, (None if changes is None else _scanned(one, changes) for one, changes in pairs)

    return look


class _Looked(NamedTuple):
    tile: Tile
    before: Array
    after: Array
    moving: Array | None  # which rows change; None: the tile is not coded by rows
    row: int  # elements of a row

    def scanned(self) -> tuple[Array, Array]:
        """Return the old and new bits to scan: those of the rows that change, or of the whole tile."""
        if self.moving is None:
            return self.before, self.after
        where = self.tile, self.row, self.moving
        return rows.picked(self.before, *where), rows.picked(self.after, *where)


def _looked(tiles: Sequence[Tile], old: Model, new: Model) -> Iterator[_Looked]:
    for tensor, mine in itertools.groupby(tiles, key=lambda tile: tile.tensor):
        row = rows.row_of(new[tensor]) if rows.may_pay(old[tensor], new[tensor]) else 0
        for tile in mine:
            before, after = tile.of(old[tensor]), tile.of(new[tensor])
            yield _Looked(tile, before, after, rows.moving(tile, row, before, after) if row else None, row)


def _scanned(looked: _Looked, changes: Changes) -> Scanned:
    if looked.moving is None:
        return Scanned(looked.tile, changes, None, 0)
    whole_tile = replace(changes, before=tile_hash(looked.before), after=tile_hash(looked.after))
    return Scanned(looked.tile, whole_tile, looked.moving, changes.after)


def _count(held: Sequence[Scanned]) -> int:
    return sum(one.changes.gaps.size for one in held)


def _edges(looked: Sequence[_Looked], kind: Kind, scan: Scan) -> Array:
    every = stretches_skipped([one.tile for one in looked])
    census = sum(scan.census(*one.scanned(), kind, every) for one in looked)
    return band_edges(np.asarray(census) * every)


def stretches_skipped(tiles: Sequence[Tile]) -> int:
    """Return one of how many stretches of a run is sampled: odd, for rows' lengths are even."""
    return sum(tile.count for tile in tiles) // _SAMPLE | 1


def _group(dtype: str, held: list[Scanned], edges: Array, parts: int, new: Model) -> CodedGroup:
    """Code all held tiles as one group, and clear the list."""
    tiles, kind = [one.tile for one in held], kind_of(dtype)
    elements = sum(tile.count for tile in tiles)
    before, after = _told([one.changes.before for one in held]), _told([one.changes.after for one in held])
    body, mode = [before, after], SAME
    if _count(held):
        mode = BANDED
        if any(one.moving is not None for one in held):
            mode = ROWED
            body += _rowed(held)
        wide = kind.bits >= _WIDE and _count(held) > _DENSE * elements
        body += _banded(edges, [one.changes for one in held], fast=wide)
    held.clear()
    size = coded_size(body)
    if size > _LARGE * (elements * kind.bits // 8):
        data = [tile.of(new[tile.tensor]) for tile in tiles]
        if size > _whole_size(data, kind):
            full = [after, *whole.pack_whole(data, kind)]
            if coded_size(full) < size:
                return group_of(dtype, WHOLE, tiles, full, parts=parts)
    return group_of(dtype, mode, tiles, body, parts=parts)


def _whole_size(data: Sequence[Array], kind: Kind) -> float:
    """Estimate how few bytes whole tiles need, from a sample: packing all of them takes long."""
    parts = [some[at : at + _STRETCH] for some in data for at in range(0, some.size, _STRETCH * _ONE_IN)]
    return (
        _SURELY
        * coded_size(whole.pack_whole(parts, kind))
        * sum(some.size for some in data)
        / sum(map(len, parts))
    )


def _rowed(held: Sequence[Scanned]) -> list[bytes]:
    told = [one for one in held if one.moving is not None]
    masks = [np.packbits(one.moving) for one in told if one.moving is not None]
    flags = np.array([one.moving is not None for one in held], np.uint8)
    return [streams.pack_streams(flags), streams.pack_streams(*masks), _told([one.inner for one in told])]


def _told(hashes: Sequence[int]) -> bytes:
    return np.array(hashes, np.uint64).tobytes()


def _banded(edges: Array, changes: Sequence[Changes], *, fast: bool) -> list[bytes]:
    counts = np.stack([one.counts for one in changes])
    parts = [streams.pack_streams(edges), streams.pack_streams(counts.reshape(-1))]
    for band in range(edges.size):
        mine = [(one, slice(one.begins[band], one.ends[band])) for one in changes]
        parts.append(streams.pack_streams(*(one.gaps[part] for one, part in mine), fast=fast))
        parts.append(streams.pack_streams(*(one.steps[part] for one, part in mine), fast=fast))
    return parts
