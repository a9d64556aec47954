"""The scan of tiles on a GPU, in Triton: the changes of `scan.py`, number for number.

    1  in each block: how many elements of each band there are, and how many of them change
    2  sums over the blocks before: which place in its band a block's first element has
    3  each element's place in its band, by a sum over the block; the changed ones are written out

To apply changes, steps are laid out band by band, with a place for each element, so that each element finds
its own step. Tiles come from the processor's memory, where they are hashed too; only changed elements go
back.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from infra import choices
from infra.weights.arrays import Array
from infra.weights.bits import Kind
from infra.weights.codec import scan_plain
from infra.weights.codec.bands import band_table
from infra.weights.codec.scan import Changes
from infra.weights.codec.tiles import tile_hash
from infra.weights.weights_error import WeightsError

census = scan_plain.census  # in numpy: the elements are too few to be worth copying to the GPU
_BLOCK = 1024


def scan(old: Array, new: Array, kind: Kind, edges: Array, most: int) -> Changes | None:
    """Return the changes, band by band; None if there are more than `most`."""
    was, now, table = _there(old), _there(new), _there(band_table(edges))
    counts, changed = _counts(was, now, table, kind, edges.size)
    before = counts.cumsum(0) - counts
    of_band = changed.sum(0)
    ends = of_band.cumsum(0)
    begins, total = ends - of_band, int(of_band.sum())
    if total > most:
        return None
    where = begins + changed.cumsum(0) - changed
    ranks, steps = (torch.empty(total, dtype=torch.int64, device=was.device) for _ in "rs")
    _changes_kernel[_grid(was)](
        was, now, table, before, where, ranks, steps, was.numel(), kind.fraction, kind.exponents - 1,
        kind.sign, (1 << kind.bits) - 1, n_bands=edges.size, block=_BLOCK,
    )  # fmt: skip
    gaps = ranks - torch.cat([ranks.new_full((1,), -1), ranks[:-1]]) - 1
    first = begins[of_band > 0]
    gaps[first] = ranks[first]
    found = (gaps.cpu().numpy().astype(np.uint32), steps.cpu().numpy().astype(kind.unsigned))
    return Changes(begins.cpu().numpy(), ends.cpu().numpy(), *found, tile_hash(old), tile_hash(new))


def apply(data: Array, kind: Kind, edges: Array, changes: Changes) -> bool:
    """Turn old bits into new ones, in place. Returns False, and changes nothing, if they come out wrong."""
    was, table = _there(data), _there(band_table(edges))
    counts, _ = _counts(was, was, table, kind, edges.size)
    of_band = counts.sum(0)
    starts = of_band.cumsum(0) - of_band
    mine = [slice(*ends) for ends in zip(changes.begins.tolist(), changes.ends.tolist(), strict=True)]
    gaps = [changes.gaps[one].astype(np.int64) for one in mine]
    ranks = _there(np.concatenate([np.cumsum(one + 1) - 1 for one in gaps]))
    owner = torch.repeat_interleave(torch.arange(edges.size, device=was.device), _there(changes.counts))
    if bool((ranks >= of_band[owner]).any()):
        return False
    steps = torch.zeros(data.size, dtype=torch.int64, device=was.device)
    told = np.concatenate([changes.steps[one] for one in mine]).astype(np.int64)
    steps[starts[owner] + ranks] = _there(told)
    made = torch.empty_like(was)
    _apply_kernel[_grid(was)](
        was, made, table, starts + counts.cumsum(0) - counts, steps, data.size, kind.fraction,
        kind.exponents - 1, kind.sign, (1 << kind.bits) - 1, n_bands=edges.size, block=_BLOCK,
    )  # fmt: skip
    bits = made.view(getattr(torch, f"int{kind.bits}"))  # torch knows little of unsigned numbers
    where = (bits != was.view(bits.dtype)).nonzero().reshape(-1)
    places = where.cpu().numpy()
    before = data[places]
    data[places] = bits[where].cpu().numpy().view(kind.unsigned)
    if tile_hash(data) == changes.after:
        return True
    data[places] = before
    return False


def _there(numbers: Array) -> torch.Tensor:
    """Return numbers on the GPU; or on the processor, if Triton's interpreter is used without a GPU."""
    if not (cuda := choices.cuda()) and os.environ.get("TRITON_INTERPRET") != "1":
        raise WeightsError("weights are to be scanned on a GPU, but torch sees none: unset STREAMRL_SCAN")
    plain = numbers if numbers.flags.writeable else numbers.copy()
    return torch.from_numpy(plain).to("cuda" if cuda else "cpu")


def _grid(data: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(data.numel(), _BLOCK),)


def _counts(
    old: torch.Tensor, new: torch.Tensor, table: torch.Tensor, kind: Kind, bands: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of elements, and that of changes, by block and band."""
    found = torch.empty(2, *_grid(old), bands, dtype=torch.int64, device=old.device)
    _counts_kernel[_grid(old)](
        old, new, table, found[0], found[1], old.numel(), kind.fraction, kind.exponents - 1, n_bands=bands,
        block=_BLOCK,
    )  # fmt: skip
    return found[0], found[1]


@triton.jit
def _block(data: Any, table: Any, size: Any, fraction: Any, most: Any, block: tl.constexpr) -> Any:
    """Return a program's elements: their places, whether they are in the tile, their bits, their bands."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    bits = tl.load(data + at, there, 0).to(tl.int64)
    return at, there, bits, tl.load(table + ((bits >> fraction) & most)).to(tl.int64)


@triton.jit
def _ordered(bits: Any, sign: Any, whole: Any) -> Any:
    return bits ^ tl.where((bits & sign) != 0, whole, sign)


@triton.jit
def _counts_kernel(
    old: Any, new: Any, table: Any, counts: Any, changed: Any, size: Any, fraction: Any, most: Any,
    n_bands: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    at, there, was, band = _block(old, table, size, fraction, most, block)
    now = tl.load(new + at, there, 0).to(tl.int64)
    for b in range(n_bands):
        mine = there & (band == b)
        place = tl.program_id(0) * n_bands + b
        tl.store(counts + place, tl.sum(mine.to(tl.int64)))
        tl.store(changed + place, tl.sum((mine & (was != now)).to(tl.int64)))


@triton.jit
def _changes_kernel(
    old: Any, new: Any, table: Any, before: Any, where: Any, ranks: Any, steps: Any, size: Any,
    fraction: Any, most: Any, sign: Any, whole: Any, n_bands: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    at, there, was, band = _block(old, table, size, fraction, most, block)
    now = tl.load(new + at, there, 0).to(tl.int64)
    step = (_ordered(now, sign, whole) - _ordered(was, sign, whole)) & whole
    code = ((2 * step) & whole) ^ tl.where(2 * step > whole, whole, 0)
    for b in range(n_bands):
        mine = there & (band == b)
        moves = mine & (was != now)
        own = tl.program_id(0) * n_bands + b
        rank = tl.load(before + own) + tl.cumsum(mine.to(tl.int64), 0) - 1
        slot = tl.load(where + own) + tl.cumsum(moves.to(tl.int64), 0) - 1
        tl.store(ranks + slot, rank, moves)
        tl.store(steps + slot, code, moves)


@triton.jit
def _apply_kernel(
    data: Any, to: Any, table: Any, before: Any, steps: Any, size: Any, fraction: Any, most: Any, sign: Any,
    whole: Any, n_bands: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    at, there, bits, band = _block(data, table, size, fraction, most, block)
    slot = tl.zeros((block,), tl.int64)
    for b in range(n_bands):
        mine = there & (band == b)
        rank = tl.load(before + tl.program_id(0) * n_bands + b) + tl.cumsum(mine.to(tl.int64), 0) - 1
        slot = tl.where(mine, rank, slot)
    code = tl.load(steps + slot, there, 0)
    step = (code >> 1) ^ tl.where((code & 1) != 0, whole, 0)
    place = (_ordered(bits, sign, whole) + step) & whole
    made = tl.where(sign != 0, place ^ tl.where((place & sign) != 0, sign, whole), place)
    tl.store(to + at, made.to(to.dtype.element_ty), there)
