"""The scan of tiles on a GPU, in Triton: the changes of `scan.py`, number for number.

    1  in each block: how many elements of each band there are, and how many of them change
    2  sums over the blocks before: which place in its band a block's first element has
    3  each element's place in its band, by a sum over the block; the changed ones are written out

Back, steps are laid out band by band, with a place for each element, so that it finds its own there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from infra.weights.bits import Array, Kind
from infra.weights.codec.scan import Changes

_BLOCK = 1024


def census(old: torch.Tensor, new: torch.Tensor, kind: Kind) -> Array:
    """By exponent of the old bits: how many elements there are, and how many change."""
    exponents = (old.to(torch.int64) >> kind.fraction) & (kind.exponents - 1)
    some = exponents, exponents[old.to(torch.int64) != new.to(torch.int64)]
    return torch.stack([torch.bincount(one, minlength=kind.exponents) for one in some]).cpu().numpy()


def scan(old: torch.Tensor, new: torch.Tensor, kind: Kind, bands: Array) -> Changes:
    """What changes, band by band; `old` and `new` are one tile's bits, as unsigned integers on the GPU."""
    band = torch.from_numpy(bands).to(old.device)
    counts, changed = _counts(old, new, kind, band)
    before = counts.cumsum(0) - counts
    of_band = changed.sum(0)
    starts = of_band.cumsum(0) - of_band
    where = starts + changed.cumsum(0) - changed
    total = int(of_band.sum())
    places = torch.empty(total, dtype=torch.int64, device=old.device)
    steps = torch.empty(total, dtype=torch.int64, device=old.device)
    _changes_kernel[_grid(old)](
        old, new, band, before, where, places, steps, old.numel(), kind.fraction, kind.exponents - 1,
        kind.sign, (1 << kind.bits) - 1, n_bands=counts.shape[1], block=_BLOCK,
    )  # fmt: skip
    gaps = places - torch.cat([places.new_full((1,), -1), places[:-1]]) - 1
    first = starts[of_band > 0]
    gaps[first] = places[first]
    return Changes(
        of_band.cpu().numpy().astype(np.uint32),
        gaps.cpu().numpy().astype(np.uint32),
        steps.cpu().numpy().astype(kind.unsigned),
    )


def apply(data: torch.Tensor, kind: Kind, bands: Array, changes: Changes) -> bool:
    """Make old bits new ones, in place; False if the changes are not of such a tile."""
    band = torch.from_numpy(bands).to(data.device)
    counts, _ = _counts(data, data, kind, band)
    of_band = counts.sum(0)
    starts = of_band.cumsum(0) - of_band
    before = starts + counts.cumsum(0) - counts
    told = torch.from_numpy(changes.counts.astype(np.int64)).to(data.device)
    ends = told.cumsum(0)
    ranks = (torch.from_numpy(changes.gaps.astype(np.int64)).to(data.device) + 1).cumsum(0)
    ahead = torch.where(ends > told, ranks[(ends - told - 1).clamp(min=0)], 0) if ranks.numel() else told
    owner = torch.repeat_interleave(torch.arange(len(told), device=data.device), told)
    ranks = ranks - ahead[owner] - 1
    if bool((ranks >= of_band[owner]).any()):
        return False
    steps = torch.zeros(data.numel(), dtype=torch.int64, device=data.device)
    steps[starts[owner] + ranks] = torch.from_numpy(changes.steps.astype(np.int64)).to(data.device)
    _apply_kernel[_grid(data)](
        data, band, before, steps, data.numel(), kind.fraction, kind.exponents - 1, kind.sign,
        (1 << kind.bits) - 1, n_bands=counts.shape[1], block=_BLOCK,
    )  # fmt: skip
    return True


def _grid(data: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(data.numel(), _BLOCK),)


def _counts(
    old: torch.Tensor, new: torch.Tensor, kind: Kind, band: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """By block and band: elements, and changes."""
    bands = int(band.max()) + 1
    found = torch.empty(2, *_grid(old), bands, dtype=torch.int64, device=old.device)
    _counts_kernel[_grid(old)](
        old, new, band, found[0], found[1], old.numel(), kind.fraction, kind.exponents - 1, n_bands=bands,
        block=_BLOCK,
    )  # fmt: skip
    return found[0], found[1]


@triton.jit
def _counts_kernel(
    old: Any, new: Any, bands: Any, counts: Any, changed: Any, size: Any, fraction: Any, most: Any,
    n_bands: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    was = tl.load(old + at, there, 0).to(tl.int64)
    now = tl.load(new + at, there, 0).to(tl.int64)
    band = tl.load(bands + ((was >> fraction) & most)).to(tl.int64)
    for b in range(n_bands):
        mine = there & (band == b)
        place = tl.program_id(0) * n_bands + b
        tl.store(counts + place, tl.sum(mine.to(tl.int64)))
        tl.store(changed + place, tl.sum((mine & (was != now)).to(tl.int64)))


@triton.jit
def _ordered(bits: Any, sign: Any, whole: Any) -> Any:
    return bits ^ tl.where((bits & sign) != 0, whole, sign)


@triton.jit
def _changes_kernel(
    old: Any, new: Any, bands: Any, before: Any, where: Any, places: Any, steps: Any, size: Any,
    fraction: Any, most: Any, sign: Any, whole: Any, n_bands: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    was = tl.load(old + at, there, 0).to(tl.int64)
    now = tl.load(new + at, there, 0).to(tl.int64)
    band = tl.load(bands + ((was >> fraction) & most)).to(tl.int64)
    step = (_ordered(now, sign, whole) - _ordered(was, sign, whole)) & whole
    code = ((2 * step) & whole) ^ tl.where(2 * step > whole, whole, 0)
    for b in range(n_bands):
        mine = there & (band == b)
        moves = mine & (was != now)
        own = tl.program_id(0) * n_bands + b
        rank = tl.load(before + own) + tl.cumsum(mine.to(tl.int64), 0) - 1
        slot = tl.load(where + own) + tl.cumsum(moves.to(tl.int64), 0) - 1
        tl.store(places + slot, rank, moves)
        tl.store(steps + slot, code, moves)


@triton.jit
def _apply_kernel(
    data: Any, bands: Any, before: Any, steps: Any, size: Any, fraction: Any, most: Any, sign: Any,
    whole: Any, n_bands: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    there = at < size
    was = tl.load(data + at, there, 0)
    bits = was.to(tl.int64)
    band = tl.load(bands + ((bits >> fraction) & most)).to(tl.int64)
    slot = tl.zeros((block,), tl.int64)
    for b in range(n_bands):
        mine = there & (band == b)
        rank = tl.load(before + tl.program_id(0) * n_bands + b) + tl.cumsum(mine.to(tl.int64), 0) - 1
        slot = tl.where(mine, rank, slot)
    code = tl.load(steps + slot, there, 0)
    step = (code >> 1) ^ tl.where((code & 1) != 0, whole, 0)
    place = (_ordered(bits, sign, whole) + step) & whole
    made = tl.where(sign != 0, place ^ tl.where((place & sign) != 0, sign, whole), place)
    tl.store(data + at, made.to(was.dtype), there & (code != 0))
