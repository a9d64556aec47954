"""Applies groups to weights that lie on a GPU. Streams are decoded by the processor; all else is done there.

changes ──► GPU: each finds its element, in a copy of the tiles ──► hashes ──► main memory: right?
tiles ◄──── those that came out right are copied back ◄──────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import triton

from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.codec import gpu_kernels
from infra.weights.codec.decoding import (
    ChangedTiles,
    WholeTiles,
    read_group,
    stale_tile,
    wrong_tile,
)
from infra.weights.codec.groups import Head
from infra.weights.codec.laid_tiles import (
    BLOCKS,
    BandsThere,
    LaidTiles,
    Layout,
    Source,
    picked_rows,
    put_picked_rows,
    tile_source,
)
from infra.weights.codec.tiles import Tile, tile_hash
from infra.weights.gpu_bits import GpuBits, device_of
from infra.weights.gpu_transfer import downloaded, own_stream, settled, uploaded
from infra.weights.weights_error import WeightsError

_AT_ONCE = 16  # changes of a program


class GpuChange:
    """Applies a chunk's groups to a model on a GPU, in place."""

    def __init__(self, model: Mapping[str, GpuBits], what: str) -> None:
        self._model, self._what = model, what
        self._device = device_of(model)
        settled(self._device)

    def __call__(self, head: Head, body: memoryview) -> list[Tile]:
        """Turn a group's old tiles into new ones; return those that changed. See `decoding.decode_group`."""
        read = read_group(head, body, self._model, self._what)
        with own_stream(self._device):
            return self._replaced(read) if isinstance(read, WholeTiles) else self._changed(read)

    def _replaced(self, read: WholeTiles) -> list[Tile]:
        sources, done = self._sources(read.tiles), []
        kind = self._model[read.tiles[0].tensor].kind
        for number, (tile, held) in enumerate(zip(read.tiles, self._hashes(sources, kind), strict=True)):
            if held == read.after[number]:
                continue
            made = read.full.tile(number, tile.count)
            if tile_hash(made) != read.after[number]:
                raise wrong_tile(tile, self._what)
            sources[number].part.copy_(uploaded(self._device, made)[0])
            done.append(tile)
        return done

    def _sources(self, tiles: Sequence[Tile]) -> list[Source]:
        return [tile_source(tile, self._model[tile.tensor], self._device) for tile in tiles]

    def _hashes(self, sources: Sequence[Source], kind: Kind) -> list[int]:
        if not sources:
            return []
        laid = LaidTiles([source.count for source in sources], kind, self._device)
        queued = laid.hashes(laid.lay(sources))
        return queued.told(*downloaded(*queued.parts))

    def _changed(self, read: ChangedTiles) -> list[Tile]:
        sources, kind = self._sources(read.tiles), self._model[read.tiles[0].tensor].kind
        some = np.any(read.ends > read.begins, axis=1).tolist()
        rowed = {n: rows for n, rows in read.moving.items() if some[n] and rows.mask.any()}
        lost = [n for n in read.moving if some[n] and n not in rowed]  # changes in none of a tile's rows
        scanned = list(sources)
        for number, rows in rowed.items():
            scanned[number] = picked_rows(sources[number], rows.tile, rows.row, rows.mask)
        laid = LaidTiles([source.count for source in scanned], kind, self._device)
        made, wrong = self._applied(read, laid, laid.lay(scanned), kind)
        queued = laid.hashes(made)
        misfits, *parts = downloaded(wrong, *queued.parts)
        found, expected = queued.told(*parts), [int(one) for one in read.hashes[1]]
        wanted = [rowed[number].after if number in rowed else one for number, one in enumerate(expected)]
        right = [
            not misfit and one == want and number not in lost
            for number, (misfit, one, want) in enumerate(zip(misfits, found, wanted, strict=True))
        ]
        for number in rowed:
            if right[number]:
                scanned[number] = self._with_rows(read, sources[number], laid.of(made, number), number)
        mixed = [number for number in rowed if right[number]]
        for number, one in zip(mixed, self._hashes([scanned[n] for n in mixed], kind), strict=True):
            right[number] = one == expected[number]
        asked = [number for number, fits in enumerate(right) if not fits and some[number]]
        held = dict(zip(asked, self._hashes([sources[n] for n in asked], kind), strict=True))
        error = self._first_error(read, right, [held.get(n, found[n]) for n in range(len(found))])
        last = len(found) if error is None else error[0]
        done = [number for number in range(last) if some[number] and right[number]]
        laid.put(made, sources, [number for number in done if number not in rowed])
        for number in done:
            if number in rowed:
                sources[number].part.copy_(scanned[number].part)
        if error is not None:
            raise error[1]
        return [read.tiles[number] for number in done]

    def _first_error(
        self, read: ChangedTiles, right: Sequence[bool], held: Sequence[int]
    ) -> tuple[int, WeightsError] | None:
        """Return the first tile that neither comes out right nor is new already, and what is said of it."""
        for number, (tile, fits) in enumerate(zip(read.tiles, right, strict=True)):
            before, after = (int(one) for one in read.hashes[:, number])
            if not fits and held[number] != after:
                said = wrong_tile if held[number] == before else stale_tile
                return number, said(tile, self._what)
        return None

    def _with_rows(self, read: ChangedTiles, source: Source, made: torch.Tensor, number: int) -> Source:
        """Return a copy of a tile into which its new rows are put."""
        rows, copy = read.moving[number], source.part.clone()
        put_picked_rows(copy, rows.tile, rows.row, rows.mask, made)
        return Source(copy, 0, source.count)

    def _applied(
        self, read: ChangedTiles, laid: LaidTiles, flat: torch.Tensor, kind: Kind
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return changed elements; and of each tile, 1 if one of its changes found no element."""
        tiles, total = len(read.tiles), read.gaps.size
        wrong = torch.zeros(tiles, dtype=torch.int32, device=self._device)
        if not total:
            return flat, wrong
        counts: Array = (read.ends - read.begins).T.reshape(-1)  # of each band's tiles
        gaps, steps, begins, counted = uploaded(
            self._device, read.gaps, read.steps, np.cumsum(counts) - counts, counts
        )
        numbers = torch.arange(counts.size, dtype=torch.int32, device=self._device)
        segments = numbers.repeat_interleave(counted, output_size=total)
        behind = gaps.to(torch.int64).bitwise_and_(0xFFFFFFFF).add_(1).cumsum(0)
        bands, made = BandsThere.of(read.edges, self._device), flat.clone()
        gpu_kernels.launch(
            gpu_kernels.apply_kernel, triton.cdiv(total, _AT_ONCE), flat, made, wrong, segments, begins,
            behind, steps, laid.first_there, bands.edges,
            laid.before(flat, bands, tiles), int(laid.first[-1]) * BLOCKS, tiles, total,
            laid.most_blocks.bit_length(), **Layout.of(kind).all, at_once=_AT_ONCE,
        )  # fmt: skip
        return made, wrong
