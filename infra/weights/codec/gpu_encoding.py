"""Looks for changes in weights that lie on a GPU: the chunks are those of the processor, byte for byte.

    1  how many elements of each tile change, and a sample of the run ──► main memory: bands, dense tiles
    2  where elements change · how many elements of each band each block has, summed up
    3  of each change: its place in its band, and its step ──► sorted by tile and band ──► gaps
    4  hashes

The processor waits twice for a run, or three times where a tensor's rows are looked at. It gets changes and
hashes, and codes them while other threads' runs are on the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Kind, Model
from infra.weights.codec import gpu_kernels, rows
from infra.weights.codec.bands import band_edges
from infra.weights.codec.encoding import Scanned, run_bytes, sampled_every, stretches_skipped
from infra.weights.codec.laid_tiles import (
    BLOCKS,
    PAGE,
    BandsThere,
    LaidTiles,
    Layout,
    Source,
    picked_rows,
    tile_source,
)
from infra.weights.codec.scan import SAMPLED, Changes, scanner
from infra.weights.codec.tiles import Tile
from infra.weights.gpu_bits import GpuBits, device_of
from infra.weights.gpu_transfer import downloaded, own_stream, uploaded

_AT_ONCE = 16  # changes of a program that looks through each one's block
_IN_ORDER = 1024  # changes of a program that looks at nothing else


class GpuLook:
    """Looks at runs of a new model that lies on a GPU, and of an old one that may."""

    no_room = torch.OutOfMemoryError

    def __init__(self, old: Model, new: Mapping[str, GpuBits]) -> None:
        self._old, self._new = old, new
        self._device = device_of(new)
        with own_stream(self._device):
            self.run_size, self._rows = self._sampled()

    def __call__(
        self, kind: Kind, tiles: Sequence[Tile], most: int
    ) -> tuple[Array, Iterator[Scanned | None]]:
        """See `encoding.Look`."""
        edges, found = _Run(kind, self._pairs(tiles), most, self._device).scanned()
        return edges, iter(found)

    def _sampled(self) -> tuple[int, dict[str, int]]:
        """Return the bytes of a run; and of tensors that rows may pay for, a row's elements."""
        every, counts, asked = sampled_every(self._new), [], []
        for name, new in self._new.items():
            old = self._old[name]
            counts.append((_each(old, 1, every, self._device) != _each(new, 1, every, self._device)).sum())
            if row := rows.row_of(new):
                apart = rows.rows_apart(new, row)
                pair = (_each(bits, row, apart, self._device) for bits in (old, new))
                moving = torch.ne(*pair).any(1)
                asked.append((name, row, moving.numel()))
                counts.append(moving.sum())
        (told,) = downloaded(torch.stack(counts))
        numbers, changed, found, questions = told.tolist(), 0, {}, iter(asked)
        for new in self._new.values():
            changed += numbers.pop(0)
            if rows.row_of(new):
                name, row, looked = next(questions)
                if numbers.pop(0) / looked <= rows.MOST_MOVING:
                    found[name] = row
        sizes = (-(-bits.size // every) for bits in self._new.values())
        return run_bytes(changed, sum(sizes)), found

    def _pairs(self, tiles: Sequence[Tile]) -> list[_Pair]:
        """Return tiles' old and new elements; find out which tiles are coded by rows."""
        both = [
            [tile_source(tile, model[tile.tensor], self._device) for model in (self._old, self._new)]
            for tile in tiles
        ]
        asked, parts = [], []
        for number, (tile, pair) in enumerate(zip(tiles, both, strict=True)):
            if row := self._rows.get(tile.tensor, 0):
                moves = pair[0].part != pair[1].part
                begin, count = tile.start % row, rows.rows_in(tile, row)
                padded = torch.nn.functional.pad(moves, (begin, count * row - begin - tile.count))
                asked.append((number, row, count))
                parts += [moves.sum().reshape(1), padded.view(count, row).any(1)]
        told = iter(downloaded(*parts))
        masks: dict[int, tuple[int, Array]] = {}
        for number, row, count in asked:
            changed, mask = int(next(told)[0]), next(told)
            if rows.rows_pay(int(np.count_nonzero(mask)), changed, count):
                masks[number] = row, mask
        found = []
        for number, (tile, (old, new)) in enumerate(zip(tiles, both, strict=True)):
            if number not in masks:
                found.append(_Pair(tile, old, new, None, None))
                continue
            row, mask = masks[number]
            before, after = (picked_rows(source, tile, row, mask) for source in (old, new))
            found.append(_Pair(tile, before, after, mask, (old, new)))
        return found


def _each(bits: Bits, row: int, every: int, device: torch.device) -> torch.Tensor:
    """Return each so many rows of a tensor."""
    if isinstance(bits, GpuBits):
        return bits.tensor.view(-1, row)[::every]
    some = bits.data.reshape(-1, row)[::every]
    return uploaded(device, some)[0].view(some.shape)


class _Pair(NamedTuple):
    tile: Tile
    old: Source  # of the rows that change, or of the whole tile
    new: Source
    moving: Array | None  # which rows change; None: the tile is not coded by rows
    whole: tuple[Source, Source] | None  # the whole tile, if only its rows that change are scanned


class _Run:
    """A run's tiles, laid."""

    def __init__(self, kind: Kind, pairs: Sequence[_Pair], most: int, device: torch.device) -> None:
        self._kind, self._pairs, self._most, self._device = kind, pairs, most, device
        self._laid = LaidTiles([pair.new.count for pair in pairs], kind, device)
        self._old = self._laid.lay([pair.old for pair in pairs])
        self._new = self._laid.lay([pair.new for pair in pairs])
        pages = int(self._laid.first[-1])
        moved = torch.empty(pages, dtype=torch.int32, device=device)
        gpu_kernels.launch(
            gpu_kernels.moved_kernel, pages, self._old, self._new, self._laid.owner, self._laid.ends, moved
        )
        self._behind = moved.cumsum(0, dtype=torch.int32)

    def scanned(self) -> tuple[Array, list[Scanned | None]]:
        """Return the bands, and what changes in each tile, up to the first in which too much does."""
        edges, ends = self._looked()
        dense = np.flatnonzero(np.diff(ends, prepend=0) > self._most)
        tiles = int(dense[0]) if dense.size else len(self._pairs)
        found: list[Scanned | None] = [*self._changes(edges, ends[:tiles].tolist(), tiles)] if tiles else []
        return edges, found if tiles == len(self._pairs) else [*found, None]

    def _looked(self) -> tuple[Array, Array]:
        """Return the bands, and the number of changes up to each tile's end."""
        assert PAGE == SAMPLED
        every, first = stretches_skipped([pair.tile for pair in self._pairs]), self._laid.first
        pages = [np.arange(*ends, every) for ends in itertools.pairwise(first)]
        held = [
            np.minimum(PAGE, size - PAGE * (some - some[0]))
            for size, some in zip(self._laid.sizes, pages, strict=True)
        ]
        there = np.arange(PAGE) < np.concatenate(held)[:, None]
        sampled, last = uploaded(self._device, np.concatenate(pages), first[1:] - 1)
        both = (flat.view(-1, PAGE).index_select(0, sampled) for flat in (self._old, self._new))
        ends, *pair = downloaded(self._behind.index_select(0, last), *both)
        plain = [some.view(self._kind.unsigned)[there] for some in pair]
        return band_edges(scanner().census(plain[0], plain[1], self._kind, 1) * every), ends.astype(np.int64)

    def _changes(self, edges: Array, ends: list[int], tiles: int) -> Iterator[Scanned]:
        bands, total = BandsThere.of(edges, self._device), ends[-1]
        gaps, steps, behind = self._sorted(bands, tiles, total)
        whole = [pair.whole for pair in self._pairs[:tiles] if pair.whole is not None]
        queued = [self._laid.hashes(flat, tiles) for flat in (self._old, self._new)]
        if whole:
            beside = LaidTiles([new.count for _, new in whole], self._kind, self._device)
            queued += [beside.hashes(beside.lay(some)) for some in zip(*whole, strict=True)]
        told = iter(downloaded(gaps, steps, behind, *(part for one in queued for part in one.parts)))
        numbers, codes, of_band = next(told).view(np.uint32), next(told).view(self._kind.unsigned), next(told)
        before, after, *rest = ([*one.told(*(next(told) for _ in one.parts))] for one in queued)
        outer = zip(*rest, strict=True)
        counts = np.diff(of_band.astype(np.int64), prepend=0).reshape(tiles, -1)
        for number, (pair, counted, end) in enumerate(zip(self._pairs, counts, ends, strict=False)):
            stop, mine = np.cumsum(counted), slice(end - int(counted.sum()), end)
            hashes = (before[number], after[number]) if pair.whole is None else next(outer)
            changes = Changes(stop - counted, stop, numbers[mine], codes[mine], *hashes)
            yield Scanned(pair.tile, changes, pair.moving, 0 if pair.whole is None else after[number])

    def _sorted(
        self, bands: BandsThere, tiles: int, total: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gaps and steps, by tile and band; and how many changes there are up to the end of each."""
        places, ranks, keys, gaps = (
            torch.empty(total, dtype=torch.int32, device=self._device) for _ in range(4)
        )
        codes, steps = (torch.empty(total, dtype=self._old.dtype, device=self._device) for _ in range(2))
        if not total:
            return gaps, steps, torch.zeros(tiles * bands.number, dtype=torch.int32, device=self._device)
        laid, pages = self._laid, int(self._laid.first[tiles])
        gpu_kernels.launch(
            gpu_kernels.places_kernel, pages, self._old, self._new, laid.owner, laid.ends, self._behind,
            places,
        )  # fmt: skip
        gpu_kernels.launch(
            gpu_kernels.changes_kernel, triton.cdiv(total, _AT_ONCE), self._old, self._new, places,
            laid.owner, laid.first_there, bands.table, bands.edges, laid.before(self._old, bands, tiles),
            ranks, codes, keys, pages * BLOCKS, bands.number, total, **Layout.of(self._kind).all,
            at_once=_AT_ONCE,
        )  # fmt: skip
        keys, order = keys.sort(stable=True)
        gpu_kernels.launch(
            gpu_kernels.gaps_kernel, triton.cdiv(total, _IN_ORDER), keys, order, ranks, codes, gaps, steps,
            total, at_once=_IN_ORDER,
        )  # fmt: skip
        every = torch.arange(tiles * bands.number, dtype=torch.int32, device=self._device)
        return gaps, steps, torch.searchsorted(keys, every, right=True, out_int32=True)
