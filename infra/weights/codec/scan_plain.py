"""The scan of one tile in numpy. `scan_fast.py` computes the same, bit for bit; so does a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infra.weights.arrays import Array
from infra.weights.bits import Kind, ordered, unordered
from infra.weights.codec.bands import band_table
from infra.weights.codec.scan import SAMPLED, Changes
from infra.weights.codec.tiles import tile_hash

_NONE = np.zeros(0, np.uint32)
_PIECE = 1 << 16  # elements that are worked on at once: so temporary arrays stay small


def exponents_of(old: Array, kind: Kind) -> Array:
    """Return the exponent of each element."""
    found = (old >> old.dtype.type(kind.fraction)) & old.dtype.type(kind.exponents - 1)
    return found.astype(np.uint8)


def census(old: Array, new: Array, kind: Kind, every: int) -> Array:
    """Count elements, changes and the sum of steps, by old exponent, in one of `every` stretches."""
    found = np.zeros((3, kind.exponents), np.int64)
    for at in range(0, old.size, SAMPLED * every):
        before, after = old[at : at + SAMPLED], new[at : at + SAMPLED]
        exponents = exponents_of(before, kind)
        np.add.at(found[0], exponents, 1)
        np.add.at(found[1], exponents[before != after], 1)
        np.add.at(found[2], exponents, bit_steps(before, after, kind).astype(np.int64))
    return found


def scan(old: Array, new: Array, kind: Kind, edges: Array, most: int) -> Changes | None:
    """Return the changes, band by band; None if there are more than `most`."""
    ranks, places, count = [_NONE for _ in edges], [_NONE for _ in edges], 0
    for at, members, seen in _pieces(old, kind, edges):
        moved = old[at : at + _PIECE] != new[at : at + _PIECE]
        count += int(np.count_nonzero(moved))
        if count > most:
            return None
        for band, (mine, before) in enumerate(zip(members, seen, strict=True)):
            hit = np.flatnonzero(moved[mine])
            ranks[band] = _longer(ranks[band], before + hit)
            places[band] = _longer(places[band], at + mine[hit])
    gaps = [np.diff(rank.astype(np.int64), prepend=-1) - 1 for rank in ranks]
    ends, place = np.cumsum([rank.size for rank in ranks]), np.concatenate(places)
    steps = bit_steps(old[place], new[place], kind)
    begins, gap = np.append(0, ends[:-1]), np.concatenate(gaps).astype(np.uint32)
    return Changes(begins, ends, gap, steps, tile_hash(old), tile_hash(new))


def apply(data: Array, kind: Kind, edges: Array, changes: Changes) -> bool:
    """Turn old bits into new ones, in place. Returns False, and changes nothing, if they come out wrong."""
    of_band = [slice(*ends) for ends in zip(changes.begins.tolist(), changes.ends.tolist(), strict=True)]
    ranks = [np.cumsum(changes.gaps[mine].astype(np.int64) + 1) - 1 for mine in of_band]
    places = [_NONE for _ in edges]
    for at, members, seen in _pieces(data, kind, edges):
        for band, (mine, before) in enumerate(zip(members, seen, strict=True)):
            first, end = np.searchsorted(ranks[band], [before, before + mine.size])
            places[band] = _longer(places[band], at + mine[ranks[band][first:end] - before])
    if any(place.size < rank.size for place, rank in zip(places, ranks, strict=True)):
        return False
    where = np.concatenate(places)
    was, steps = data[where], np.concatenate([changes.steps[mine] for mine in of_band])
    data[where] = unordered(ordered(was, kind) + unzigzag(steps), kind)
    if tile_hash(data) == changes.after:
        return True
    data[where] = was
    return False


def _pieces(old: Array, kind: Kind, edges: Array) -> Iterator[tuple[int, list[Array], Array]]:
    """Yield pieces: where one begins, its elements of each band, and how many of each band come before."""
    table, seen = band_table(edges), np.zeros(edges.size, np.int64)
    for at in range(0, old.size, _PIECE):
        bands = table[exponents_of(old[at : at + _PIECE], kind)]
        members = [np.flatnonzero(bands == band) for band in range(edges.size)]
        yield at, members, seen
        seen = seen + np.array([mine.size for mine in members])


def _longer(numbers: Array, more: Array) -> Array:
    return np.concatenate([numbers, more], dtype=np.uint32, casting="unsafe")


def bit_steps(old: Array, new: Array, kind: Kind) -> Array:
    """Return by how many places numbers move, as codes: 0, 1, 2, 3, 4 … for 0, -1, 1, -2, 2 …"""
    step = ordered(new, kind) - ordered(old, kind)
    one = step.dtype.type(1)
    down: Array = step >> step.dtype.type(kind.bits - 1)
    return (step << one) ^ (step.dtype.type(0) - down)


def unzigzag(code: Array) -> Array:
    """Return the moves that the codes of `bit_steps` stand for."""
    one = code.dtype.type(1)
    return (code >> one) ^ (code.dtype.type(0) - (code & one))
