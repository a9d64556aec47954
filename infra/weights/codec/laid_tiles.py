"""A run's tiles on a GPU, one behind the other, each filled up to whole pages: kernels see all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from infra.weights.arrays import Array
from infra.weights.bits import Bits, Kind
from infra.weights.codec import gpu_kernels, rows
from infra.weights.codec.bands import band_table
from infra.weights.codec.gpu_hash import QueuedHashes
from infra.weights.codec.tiles import Tile
from infra.weights.gpu_bits import GpuBits
from infra.weights.gpu_transfer import ALIGNED, uploaded

PAGE, BLOCK = gpu_kernels.PAGE_ELEMENTS.value, gpu_kernels.BLOCK_ELEMENTS.value
BLOCKS = PAGE // BLOCK  # of a page
_TYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}  # torch knows little of unsigned numbers


@dataclass(frozen=True)
class Source:
    """Where a tile's elements lie: so many of a flat tensor, from one on."""

    flat: torch.Tensor
    start: int
    count: int

    @property
    def part(self) -> torch.Tensor:
        """The elements, as a view."""
        return self.flat[self.start : self.start + self.count]


def tile_source(tile: Tile, bits: Bits, device: torch.device) -> Source:
    """Return where a tile lies; if that is main memory, it is brought over."""
    if isinstance(bits, GpuBits):
        return Source(bits.tensor, tile.start, tile.count)
    return Source(uploaded(device, tile.of(bits))[0], 0, tile.count)


def picked_rows(source: Source, tile: Tile, row: int, moving: Array) -> Source:
    """Return those rows of a tile that change, end to end."""
    parts = [
        part.index_select(0, uploaded(part.device, np.flatnonzero(mine))[0]).reshape(-1)
        for part, mine in rows.parts_of_rows(source.part, tile, row, moving)
        if mine.any()
    ]
    found = torch.cat(parts)
    return Source(found, 0, found.numel())


def put_picked_rows(to: torch.Tensor, tile: Tile, row: int, moving: Array, made: torch.Tensor) -> None:
    """Write rows back to where `picked_rows` took them from."""
    at = 0
    for part, mine in rows.parts_of_rows(to, tile, row, moving):
        if not mine.any():
            continue
        where = np.flatnonzero(mine)
        some = made[at : at + where.size * part.shape[1]].view(where.size, part.shape[1])
        part.index_copy_(0, uploaded(part.device, where)[0], some)
        at += some.numel()


@dataclass(frozen=True)
class Layout:
    """A type's layout as kernels take it: signed numbers of 32 bits."""

    fraction: int
    most: int
    sign: int
    whole: int
    top: int

    @staticmethod
    def of(kind: Kind) -> Layout:
        """Return the layout of a type."""
        whole, sign = (_signed(mask) for mask in ((1 << kind.bits) - 1, kind.sign))
        return Layout(kind.fraction, kind.exponents - 1, sign, whole, kind.bits - 1)

    @property
    def exponents(self) -> dict[str, int]:
        """The arguments that say where exponents are."""
        return {"fraction": self.fraction, "most": self.most}

    @property
    def all(self) -> dict[str, int]:
        """All arguments."""
        return self.exponents | {"sign": self.sign, "whole": self.whole, "top": self.top}


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


class BandsThere(NamedTuple):
    """Bands on a GPU, as kernels take them."""

    number: int
    table: torch.Tensor  # the band of each exponent
    edges: torch.Tensor  # each band's lowest exponent, and one above the last's

    @staticmethod
    def of(edges: Array, device: torch.device) -> BandsThere:
        """Bring bands over."""
        told = np.append(edges.astype(np.int32), np.int32(256))
        return BandsThere(edges.size, *uploaded(device, band_table(edges), told))


class LaidTiles:
    """The places of tiles that lie one behind the other. Indexes fit into 32 bits: a run is not that large.

    A tile takes at most a page more than its elements, so memory is bounded by a run's bytes and tensors.
    """

    def __init__(self, sizes: Sequence[int], kind: Kind, device: torch.device) -> None:
        self._kind, self._device = kind, device
        self.sizes = np.array(sizes, np.int64)
        pages = -(-self.sizes // PAGE)
        self.first = np.append(0, np.cumsum(pages))  # page of each tile, and their number
        self.starts = self.first[:-1] * PAGE
        self.most_blocks = int(pages.max()) * BLOCKS
        owner = np.repeat(np.arange(pages.size, dtype=np.int32), pages)
        self.first_there, self.ends, self.owner = uploaded(
            device, self.first.astype(np.int32), (self.starts + self.sizes).astype(np.int32), owner
        )

    def lay(self, sources: Sequence[Source]) -> torch.Tensor:
        """Return tiles' elements, laid: where they lie, if they lie so. Nobody may write to them."""
        size, joined = int(self.first[-1]) * PAGE, _joined(self.starts.tolist(), sources)
        if len(joined) == 1 and joined[0][1].count == size:
            part = joined[0][1].part
            if part.data_ptr() % ALIGNED == 0:
                return part
        flat = torch.empty(size, dtype=_TYPES[self._kind.bits], device=self._device)
        for start, source in joined:
            flat[start : start + source.count].copy_(source.part)
        return flat

    def put(self, flat: torch.Tensor, sources: Sequence[Source], numbers: Sequence[int]) -> None:
        """Write some tiles' elements back to where they were."""
        starts = self.starts[list(numbers)].tolist()
        for start, source in _joined(starts, [sources[number] for number in numbers]):
            source.part.copy_(flat[start : start + source.count])

    def of(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return one tile's elements, as a view."""
        start = int(self.starts[number])
        return flat[start : start + int(self.sizes[number])]

    def hashes(self, flat: torch.Tensor, tiles: int | None = None) -> QueuedHashes:
        """Begin to hash the tiles, or so many first ones."""
        tiles, size = self.sizes.size if tiles is None else tiles, self._kind.bits // 8
        some = flat[: int(self.first[tiles]) * PAGE]
        return QueuedHashes(some, self.starts[:tiles] * size, self.sizes[:tiles] * size)

    def before(self, flat: torch.Tensor, bands: BandsThere, tiles: int) -> torch.Tensor:
        """Return how many elements of each band the blocks of the first tiles have before each block."""
        pages = int(self.first[tiles])
        blocks = pages * BLOCKS
        counts = torch.empty(bands.number * blocks + 1, dtype=torch.int32, device=self._device)
        counts[:1] = 0
        gpu_kernels.launch(
            gpu_kernels.counts_kernel, pages, flat, self.owner, self.ends, bands.edges, counts, blocks,
            bands.number, **Layout.of(self._kind).exponents,
        )  # fmt: skip
        return counts.cumsum(0, dtype=torch.int32)


def _joined(starts: Sequence[int], sources: Sequence[Source]) -> list[tuple[int, Source]]:
    """Join sources that follow each other here and there: fewer copies."""
    found: list[tuple[int, Source]] = []
    for start, source in zip(starts, sources, strict=True):
        if found:
            begin, last = found[-1]
            follows = source.flat is last.flat and source.start == last.start + last.count
            if follows and start == begin + last.count:
                found[-1] = begin, Source(last.flat, last.start, last.count + source.count)
                continue
        found.append((start, source))
    return found
