"""The scan of a run's tiles on a GPU: the changes of `scan.py`, number for number, for all tiles at once.

    1  in each block: how many elements of each band there are, and how many elements change
    2  sums over the blocks before: which place in its band a block's first element of that band has
    3  each element's place in its band; the changed ones are written out, and sorted by tile and band

To apply changes, steps are laid out band by band, with a place for each element, so that each element finds
its own. `gpu_kernels` has the kernels, `gpu_hash` the hashes. Only changed elements, and hashes, come back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from infra import choices
from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.codec import gpu_kernels, scan_plain
from infra.weights.codec.bands import band_table
from infra.weights.codec.gpu_hash import tile_hashes
from infra.weights.codec.scan import Changes
from infra.weights.weights_error import WeightsError

census = scan_plain.census  # in numpy: the elements are too few to be worth copying to the GPU
_ROWS = 32
_BLOCK = _ROWS * gpu_kernels.ROW.value  # elements
_TYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}  # torch knows little of unsigned numbers


def scan(
    pairs: Iterable[tuple[Array, Array]], kind: Kind, edges: Array, most: int
) -> Iterator[Changes | None]:
    """Yield each tile's changes, band by band; None, and no more, as soon as a tile has more than `most`."""
    olds, news = zip(*pairs, strict=True)
    run = _Run(olds, kind, edges)
    old, new = run.laid(olds), run.laid(news)
    counts, moved = run.counts(old, new)
    of_tile = run.by_tile(moved)
    dense = (of_tile > most).nonzero()
    tiles = int(dense[0]) if dense.numel() else len(olds)
    if tiles:
        yield from run.changes(old, new, counts, moved, of_tile[:tiles])
    if tiles < len(olds):
        yield None


def apply(datas: Iterable[Array], kind: Kind, edges: Array, changes: Sequence[Changes]) -> Iterator[bool]:
    """Turn old bits into new ones, in place. Yields False for a tile that would come out wrong, and stays."""
    tiles = list(datas)
    run = _Run(tiles, kind, edges)
    flat = run.laid(tiles)
    made, fits = run.applied(flat, changes)
    right = [
        fit and found == one.after
        for fit, found, one in zip(fits, run.hashes(made), changes, strict=True)
    ]  # fmt: skip
    where = (made != flat).nonzero().reshape(-1)
    places, bits = where.cpu().numpy(), made[where].cpu().numpy().view(kind.unsigned)
    ends = np.searchsorted(places, run.starts + run.sizes)
    begins = np.searchsorted(places, run.starts)
    for data, start, begin, end, is_right in zip(tiles, run.starts, begins, ends, right, strict=True):
        if is_right:
            data[places[begin:end] - start] = bits[begin:end]
        yield is_right


class _Run:
    """Tiles on the GPU, one behind the other, each filled up to whole blocks."""

    def __init__(self, tiles: Sequence[Array], kind: Kind, edges: Array) -> None:
        self._kind, self._bands = kind, edges.size
        self.sizes = np.array([tile.size for tile in tiles])
        blocks = -(-self.sizes // _BLOCK)
        self._first = np.append(0, np.cumsum(blocks))  # block of each tile, and their number
        self.starts = self._first[:-1] * _BLOCK
        self._device = _device()
        self._tile = _to(np.repeat(np.arange(blocks.size), blocks), self._device)  # of each block
        behind = self.starts + self.sizes
        held = np.minimum(_BLOCK, np.repeat(behind, blocks) - np.arange(self._first[-1]) * _BLOCK)
        self._held = _to(held.astype(np.int32), self._device)
        self._table = _to(band_table(edges), self._device)

    def laid(self, tiles: Sequence[Array]) -> torch.Tensor:
        """Return tiles' elements on the GPU."""
        flat = torch.empty(int(self._first[-1]) * _BLOCK, dtype=_TYPES[self._kind.bits], device=self._device)
        for tile, start in zip(tiles, self.starts.tolist(), strict=True):
            plain = tile if tile.flags.writeable else tile.copy()  # torch warns of others
            flat[start : start + tile.size] = torch.from_numpy(plain.view(f"i{tile.itemsize}"))
        return flat

    def hashes(self, flat: torch.Tensor) -> list[int]:
        """Return the tiles' hashes."""
        size = self._kind.bits // 8
        return tile_hashes(flat.view(torch.uint8), self.starts * size, self.sizes * size)

    def counts(self, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of elements by block and band, and the number of changes by block."""
        blocks = int(self._first[-1])
        fraction, most, _, whole, _ = _layout(self._kind)
        counts = torch.empty(blocks, self._bands, dtype=torch.int32, device=self._device)
        moved = torch.empty(blocks, dtype=torch.int32, device=self._device)
        gpu_kernels.counts_kernel[(blocks,)](
            old, new, self._table, self._held, counts, moved, fraction, most, whole, n_bands=self._bands,
            rows=_ROWS,
        )  # fmt: skip
        return counts, moved

    def by_tile(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """Return the sums of numbers of blocks, by tile."""
        return of_blocks.new_zeros(self.sizes.size, *of_blocks.shape[1:]).index_add_(0, self._tile, of_blocks)

    def changes(
        self, old: torch.Tensor, new: torch.Tensor, counts: torch.Tensor, moved: torch.Tensor,
        of_tile: torch.Tensor,
    ) -> Iterator[Changes]:  # fmt: skip
        """Yield the changes of the first tiles, of which `of_tile` has the number of changes."""
        total, tiles = int(of_tile.sum()), of_tile.numel()
        ranks, steps, bands = (
            torch.empty(total, dtype=dtype, device=self._device)
            for dtype in (torch.int32, old.dtype, torch.int8)
        )
        gpu_kernels.changes_kernel[(int(self._first[tiles]),)](
            old, new, self._table, self._held, self._before(counts), _before(moved), ranks, steps, bands,
            *_layout(self._kind), n_bands=self._bands, rows=_ROWS,
        )  # fmt: skip
        owner = torch.repeat_interleave(torch.arange(tiles, device=self._device), of_tile)
        keys, order = (owner * self._bands + bands).sort(stable=True)
        ranks = ranks[order]
        gaps = ranks - 1
        gaps[1:] -= torch.where(keys[1:] == keys[:-1], ranks[:-1], -1)
        gaps[:1] += 1
        of_band = torch.bincount(keys, minlength=tiles * self._bands).reshape(tiles, -1).cpu().numpy()
        told = gaps.cpu().numpy().view(np.uint32), steps[order].cpu().numpy().view(self._kind.unsigned)
        hashes = zip(self.hashes(old), self.hashes(new), strict=True)
        ends = of_tile.cumsum(0).tolist()
        for counted, end, (before, after) in zip(of_band, ends, hashes, strict=False):
            mine = slice(end - int(counted.sum()), end)
            behind = np.cumsum(counted)
            yield Changes(behind - counted, behind, told[0][mine], told[1][mine], before, after)

    def applied(self, flat: torch.Tensor, changes: Sequence[Changes]) -> tuple[torch.Tensor, list[bool]]:
        """Return changed elements, and of each tile whether its changes all found an element."""
        counts, _ = self.counts(flat, flat)
        of_band = self.by_tile(counts).reshape(-1)
        starts = _before(of_band)
        number = np.concatenate([one.counts for one in changes])
        begins, count = _to(np.cumsum(number) - number, self._device), _to(number, self._device)
        owner = torch.repeat_interleave(torch.arange(number.size, device=self._device), count)
        gaps = _to(_joined(changes, "gaps").astype(np.int64), self._device)
        steps = _to(_joined(changes, "steps").view(f"i{self._kind.bits // 8}"), self._device)
        past = (gaps + 1).cumsum(0)
        ranks = past - 1 - torch.cat([past.new_zeros(1), past])[begins][owner]
        wrong = ranks >= of_band[owner]
        misfits = torch.zeros(len(changes), dtype=torch.bool, device=self._device)
        misfits[owner[wrong] // self._bands] = True
        ranks, owner, steps = (numbers[~wrong] for numbers in (ranks, owner, steps))
        codes = torch.zeros_like(flat)
        codes[starts[owner] + ranks] = steps
        made = flat.clone()
        before = self._before(counts) + starts.reshape(-1, self._bands)[self._tile]
        gpu_kernels.apply_kernel[(self._held.numel(),)](
            flat, made, self._table, self._held, before.to(torch.int32), codes, *_layout(self._kind),
            n_bands=self._bands, rows=_ROWS,
        )  # fmt: skip
        return made, (~misfits).tolist()

    def _before(self, counts: torch.Tensor) -> torch.Tensor:
        """Return how many elements of each band the blocks before have, in the same tile."""
        every = _before(counts)
        return every - every[_to(self._first[:-1], self._device)][self._tile]


def _before(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.cumsum(0, dtype=numbers.dtype) - numbers


def _joined(changes: Sequence[Changes], name: str) -> Array:
    """Return all tiles' gaps or steps, tile by tile and band by band."""
    return np.concatenate([
        getattr(one, name)[begin:end]
        for one in changes for begin, end in zip(one.begins.tolist(), one.ends.tolist(), strict=True)
    ])  # fmt: skip


def _layout(kind: Kind) -> tuple[int, int, int, int, int]:
    """Return a type's layout as kernels take it: signed numbers of 32 bits."""
    whole, sign = (_signed(mask) for mask in ((1 << kind.bits) - 1, kind.sign))
    return kind.fraction, kind.exponents - 1, sign, whole, kind.bits - 1


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


def _device() -> torch.device:
    """Return the GPU; or the processor, if Triton's interpreter is used without a GPU."""
    if not (cuda := choices.cuda()) and os.environ.get("TRITON_INTERPRET") != "1":
        raise WeightsError("weights are to be scanned on a GPU, but torch sees none: unset STREAMRL_SCAN")
    return torch.device("cuda" if cuda else "cpu")


def _to(numbers: Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers if numbers.flags.writeable else numbers.copy()).to(device)
