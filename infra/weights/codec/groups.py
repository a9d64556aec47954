"""Tiles that share streams. What codes a group is whatever is smallest: banded, one band, or whole.

    banded   bands of the exponents · changes by tile and band · of each band: gaps, steps
    whole    of each tile its bytes: first all that hold the exponents, the others last
    same     nothing: the tiles are as they were

All are behind the hashes of the tiles' old bits (not if whole) and new bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import zstandard

from infra.weights.bits import Array, Kind, Model, kind_of
from infra.weights.codec import streams
from infra.weights.codec.bands import bands_of
from infra.weights.codec.scan import Changes, Scan, scanner
from infra.weights.codec.tiles import TILE, Tile, tile_hash
from infra.weights.errors import WeightsError

SAME, BANDED, WHOLE = range(3)
_SAMPLED = 8  # one of so many tiles decides which exponents go together
_FEW = 1 << 14  # changes of which one band may need less than several
_DENSE = 0.3  # of the elements changed: the whole may need less


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A run of a tensor's elements; it begins where a tile does."""

    tensor: str
    start: int
    count: int


class Head(msgspec.Struct, array_like=True, frozen=True):
    """What a group is."""

    dtype: str
    mode: int
    spans: list[Span]
    size: int  # bytes of its body

    def tiles(self, model: Model, what: str) -> list[Tile]:
        """Its tiles, in order, all of which the model has."""
        if self.mode not in (SAME, BANDED, WHOLE) or not self.spans:
            raise WeightsError(f"{what} is damaged: it holds a group that can't be")
        for span in self.spans:
            bits, end = model.get(span.tensor), span.start + span.count
            if bits is None or bits.dtype != self.dtype or not 0 <= span.start < end <= bits.data.size:
                raise WeightsError(
                    f"{what} is for another model: this one has no {self.dtype} "
                    f"{span.tensor}[{span.start}:{end}]"
                )
        return [
            Tile(span.tensor, start, min(TILE, span.start + span.count - start))
            for span in self.spans
            for start in range(span.start, span.start + span.count, TILE)
        ]


@dataclass(frozen=True)
class Group:
    """A group, coded."""

    head: Head
    body: bytes


def spans_of(tiles: Sequence[Tile]) -> list[Span]:
    """Tiles of one tensor as one."""
    found = []
    for tensor, some in itertools.groupby(tiles, key=lambda tile: tile.tensor):
        mine = list(some)
        found.append(Span(tensor, mine[0].start, sum(tile.count for tile in mine)))
    return found


def encode_group(
    dtype: str, tiles: Sequence[Tile], old: Model | None, new: Model, scan: Scan | None = None
) -> Group:
    """What makes a group's tiles new ones, from old ones or from nothing."""
    kind, scan = kind_of(dtype), scan or scanner()
    after = [tile.of(new[tile.tensor]) for tile in tiles]
    hashes = np.array([tile_hash(data) for data in after], np.uint64).tobytes()
    if old is None:
        return _group(dtype, WHOLE, tiles, hashes, _whole(after, kind))
    before = [tile.of(old[tile.tensor]) for tile in tiles]
    hashes = np.array([tile_hash(data) for data in before], np.uint64).tobytes() + hashes
    pairs = list(zip(before, after, strict=True))
    census = sum(scan.census(*pair, kind) for pair in pairs[::_SAMPLED])
    bands = bands_of(np.asarray(census) * (len(pairs) / len(pairs[::_SAMPLED])))
    changes = [scan.scan(*pair, kind, bands) for pair in pairs]
    changed = sum(int(one.counts.sum()) for one in changes)
    if not changed:
        return _group(dtype, SAME, tiles, hashes, b"")
    body = _banded(bands, changes)
    if changed < _FEW and bands.any():
        alone = np.zeros_like(bands)
        body = min(body, _banded(alone, [scan.scan(*pair, kind, alone) for pair in pairs]), key=len)
    if changed > _DENSE * sum(data.size for data in after):
        whole = _whole(after, kind)
        if len(whole) < len(body):
            return _group(dtype, WHOLE, tiles, hashes[len(hashes) // 2 :], whole)
    return _group(dtype, BANDED, tiles, hashes, body)


def _group(dtype: str, mode: int, tiles: Sequence[Tile], hashes: bytes, body: bytes) -> Group:
    return Group(Head(dtype, mode, spans_of(tiles), len(hashes) + len(body)), hashes + body)


def _banded(bands: Array, changes: Sequence[Changes]) -> bytes:
    counts = np.stack([one.counts for one in changes])
    ends = np.cumsum(counts, axis=1)
    parts = [streams.pack(bands), streams.pack(counts.reshape(-1))]
    for band in range(counts.shape[1]):
        mine = [slice(end[band] - count[band], end[band]) for end, count in zip(ends, counts, strict=True)]
        gaps = np.concatenate([one.gaps[part] for one, part in zip(changes, mine, strict=True)])
        narrow = gaps.astype(np.uint16) if gaps.size and gaps.max() < 1 << 16 else gaps
        parts.append(streams.pack(narrow))
        parts.append(
            streams.pack(np.concatenate([one.steps[part] for one, part in zip(changes, mine, strict=True)]))
        )
    return b"".join(parts)


def _whole(tiles: Sequence[Array], kind: Kind) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1)
    parts = [compressor.compress(plane) for data in tiles for plane in _planes(data, kind)]
    return np.array([len(part) for part in parts], np.uint32).tobytes() + b"".join(parts)


def _planes(data: Array, kind: Kind) -> Iterator[bytes]:
    """Numbers byte by byte. The sign goes last: then the first byte is the exponent."""
    if kind.sign:
        data = (data << data.dtype.type(1)) | (data >> data.dtype.type(kind.bits - 1))
    for byte in reversed(range(kind.bits // 8)):
        yield (data >> data.dtype.type(8 * byte)).astype(np.uint8).tobytes()


def _from_planes(planes: Sequence[bytes], kind: Kind) -> Array:
    data = np.zeros(len(planes[0]), kind.unsigned)
    for plane in planes:
        if kind.bits > 8:
            data <<= data.dtype.type(8)
        data |= np.frombuffer(plane, np.uint8)
    if kind.sign:
        data = (data >> data.dtype.type(1)) | (data << data.dtype.type(kind.bits - 1))
    return data


class StaleTile(WeightsError):
    """A tile holds neither the bits that a change is for nor those that it makes."""


def decode_group(
    head: Head, body: memoryview, model: Model, what: str, *, scan: Scan | None = None
) -> Iterator[Tile]:
    """Make old tiles new ones, in place, each verified before it is written; yields those that were changed.

    A tile that is new already stays: after a crash the same groups are simply decoded again.
    """
    tiles, kind, scan = head.tiles(model, what), kind_of(head.dtype), scan or scanner()
    told = 8 * len(tiles) * (1 if head.mode == WHOLE else 2)
    if len(body) < told:
        raise WeightsError(f"{what} ends too soon")
    hashes = np.frombuffer(body[:told], np.uint64)
    before, after = hashes[: -len(tiles)], hashes[-len(tiles) :]
    make: Callable[[int, Array], Array] = (
        _wholes(body[told:], tiles, kind, what)
        if head.mode == WHOLE
        else _changed(body[told:] if head.mode == BANDED else None, tiles, kind, what, scan)
    )
    for number, tile in enumerate(tiles):
        data = tile.of(model[tile.tensor])
        held = tile_hash(data)
        if held == after[number]:
            continue
        if before.size and held != before[number]:
            raise StaleTile(f"{_place(tile)} holds other bits than those that {what} is for")
        made = make(number, data)
        if tile_hash(made) != after[number]:
            raise WeightsError(f"{what} is damaged: it makes other bits of {_place(tile)} than it says")
        data[:] = made
        yield tile


def _place(tile: Tile) -> str:
    return f"{tile.tensor}[{tile.start}:{tile.start + tile.count}]"


def _wholes(body: memoryview, tiles: Sequence[Tile], kind: Kind, what: str) -> Callable[[int, Array], Array]:
    width = kind.bits // 8
    told = 4 * width * len(tiles)
    sizes = np.frombuffer(body[:told], np.uint32) if len(body) >= told else np.zeros(0, np.uint32)
    ends = np.concatenate([[told], told + np.cumsum(sizes, dtype=np.int64)])
    if not sizes.size or ends[-1] > len(body):
        raise WeightsError(f"{what} ends too soon")

    def make(number: int, data: Array) -> Array:
        parts = range(number * width, (number + 1) * width)
        return _from_planes(
            [streams.unzstd(body[ends[part] : ends[part + 1]], data.size, what) for part in parts], kind
        )

    return make


def _changed(
    body: memoryview | None, tiles: Sequence[Tile], kind: Kind, what: str, scan: Scan
) -> Callable[[int, Array], Array]:
    if body is None:
        return lambda number, data: data
    elements = sum(tile.count for tile in tiles)
    reader = streams.Reader(body, what)
    bands = reader.numbers(kind.exponents)
    if bands.size != kind.exponents or bands.dtype != np.uint8:
        raise WeightsError(f"{what} is damaged: its bands are not of this type's exponents")
    number_of_bands = int(bands.max()) + 1
    counts = reader.numbers(len(tiles) * number_of_bands)
    if counts.size != len(tiles) * number_of_bands:
        raise WeightsError(f"{what} is damaged: it does not say how many elements of each tile change")
    counts = counts.reshape(len(tiles), -1).astype(np.int64)
    gaps, steps = [], []
    for total in counts.sum(axis=0).tolist():
        gaps.append(reader.numbers(elements))
        steps.append(reader.numbers(elements))
        if not gaps[-1].size == steps[-1].size == total:
            raise WeightsError(f"{what} is damaged: its streams are not as long as it says")
    ends = np.cumsum(counts, axis=0)

    def make(number: int, data: Array) -> Array:
        parts = [slice(end - count, end) for end, count in zip(ends[number], counts[number], strict=True)]
        changes = Changes(
            counts[number].astype(np.uint32),
            np.concatenate([one[part] for one, part in zip(gaps, parts, strict=True)]).astype(np.uint32),
            np.concatenate([one[part] for one, part in zip(steps, parts, strict=True)]).astype(data.dtype),
        )
        made = data.copy()
        if not scan.apply(made, kind, bands, changes):
            raise WeightsError(f"{what} is damaged: it changes more of {_place(tiles[number])} than there is")
        return made

    return make
