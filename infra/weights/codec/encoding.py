"""Tiles to groups. What codes a group is whatever is smallest: banded, in as many bands as pay, or whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from infra.weights.bits import Array, Kind, Model, kind_of
from infra.weights.codec import streams, whole
from infra.weights.codec.bands import edges_of
from infra.weights.codec.groups import BANDED, SAME, WHOLE, Group, group_of, size_of
from infra.weights.codec.scan import Changes, Scan, scanner
from infra.weights.codec.tiles import LONGER, PARTS, RUN, TILE, Tile, tile_hash

_SAMPLE = 1 << 16  # elements of a run that decide which exponents go together
_LOOKED_AT = 1 << 18  # elements of a model that decide how long its runs are
_SPARSE = 0.01  # of the elements change: there a run of the usual length says enough
_LARGE = 0.3  # of the bytes: no whole is known to need less


def run_size(old: Model | None, new: Model) -> int:
    """Bytes of a run: more where little changes, by a few elements of each tensor."""
    if old is None:
        return RUN
    every = sum(bits.data.size for bits in new.values()) // _LOOKED_AT | 1
    pairs = [(old[name].data[::every], new[name].data[::every]) for name in new]
    share = sum(int((before != after).sum()) for before, after in pairs) / max(1, sum(a.size for a, _ in pairs))
    return RUN * next((times for times in (LONGER, LONGER // 2) if share * times <= _SPARSE), 1)


def encode_run(
    dtype: str, tiles: Sequence[Tile], old: Model | None, new: Model, scan: Scan | None = None,
    *, parts: int = 1,
) -> Iterator[Group]:  # fmt: skip
    """What makes a run's tiles new ones, from old ones or from nothing."""
    kind, scan = kind_of(dtype), scan or scanner()
    if old is None:
        after = [tile.of(new[tile.tensor]) for tile in tiles]
        hashes = _told([tile_hash(data) for data in after])
        yield group_of(dtype, WHOLE, tiles, [hashes, *whole.pack(after, kind)])
        return
    pairs = [(tile.of(old[tile.tensor]), tile.of(new[tile.tensor])) for tile in tiles]
    edges, small = _edges(pairs, kind, scan), TILE // PARTS
    room = TILE * kind.bits // (32 + kind.bits)  # changes that are no larger than a tile: more are not held
    held: list[_Scanned] = []
    for number, (tile, pair) in enumerate(zip(tiles, pairs, strict=True)):
        changes = scan.scan(*pair, kind, edges, small)
        if held and (changes is None or _count(held) + changes.gaps.size > room):
            yield _group(dtype, held, edges, parts)
        if changes is None:
            rest = [part for one in tiles[number:] for part in one.cut(small)]
            yield from encode_run(dtype, rest, old, new, scan, parts=PARTS)
            return
        held.append(_Scanned(tile, pair[1], changes))
    yield _group(dtype, held, edges, parts)


class _Scanned(NamedTuple):
    tile: Tile
    data: Array  # the new bits
    changes: Changes


def _count(held: Sequence[_Scanned]) -> int:
    return sum(one.changes.gaps.size for one in held)


def _edges(pairs: Sequence[tuple[Array, Array]], kind: Kind, scan: Scan) -> Array:
    every = sum(before.size for before, _ in pairs) // _SAMPLE | 1  # odd: rows' lengths are not
    census = sum(scan.census(*pair, kind, every) for pair in pairs)
    return edges_of(np.asarray(census) * every)


def _group(dtype: str, held: list[_Scanned], edges: Array, parts: int) -> Group:
    """A group of all that is held; no more of it is held then."""
    tiles, data, changed = [one.tile for one in held], [one.data for one in held], _count(held)
    before, after = _told([one.changes.before for one in held]), _told([one.changes.after for one in held])
    body = [before, after]
    if changed:
        body += _banded(edges, [one.changes for one in held])
    held.clear()
    if size_of(body) > _LARGE * sum(some.nbytes for some in data):
        full = [after, *whole.pack(data, kind_of(dtype))]
        if size_of(full) < size_of(body):
            return group_of(dtype, WHOLE, tiles, full, parts=parts)
    return group_of(dtype, BANDED if changed else SAME, tiles, body, parts=parts)


def _told(hashes: Sequence[int]) -> bytes:
    return np.array(hashes, np.uint64).tobytes()


def _banded(edges: Array, changes: Sequence[Changes]) -> list[bytes]:
    counts = np.stack([one.counts for one in changes])
    parts = [streams.pack(edges), streams.pack(counts.reshape(-1))]
    for band in range(edges.size):
        mine = [(one, slice(one.begins[band], one.ends[band])) for one in changes]
        parts.append(streams.pack(*(one.gaps[part] for one, part in mine)))
        parts.append(streams.pack(*(one.steps[part] for one, part in mine)))
    return parts
