"""Pack sequences end to end: per-token computation then has no padding, and attention has little.

tokens     a a a b b b c c c c c d d d d d d · ·      · filling, on some CPUs: up to a row count with a kernel
positions  0 1 2 0 1 2 0 1 2 3 4 0 1 2 3 4 5 0 0

grids      a a a      c c c c c ·      attention computes sequences of similar length together,
           b b b      d d d d d d      causally: no real token sees the padding behind it

On GPUs one call computes the attention of all sequences, where it can (`varlen_attention.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from consumers.batches import varlen_attention
from infra.cpu_linear import padded_rows, pays
from infra.errors import Explained
from infra.sending import sent

GRID_COST = 8.0  # another grid costs attention about as much as so many padding tokens
NAME = "streamrl_packed"  # under which this attention is registered in transformers


class UnsupportedAttention(Explained):
    """The model's attention has a feature that is not implemented here."""

    lasting = True


@dataclass(frozen=True)
class Grid:
    """Sequences that attention computes together, padded to one length. Indexes only if lengths differ."""

    sequences: int
    longest: int
    tokens: int
    from_grid: torch.Tensor | None = None  # [tokens] the place of each token in the grid
    to_grid: torch.Tensor | None = (
        None  # [sequences * longest] the token at each place of the grid; any token where there is padding
    )

    def to(self, device: torch.device) -> Grid:
        """Return the grid with its tensors on a device."""
        if self.from_grid is None or self.to_grid is None:
            return self
        return replace(self, from_grid=sent(self.from_grid, device), to_grid=sent(self.to_grid, device))


@dataclass(frozen=True)
class Packing:
    """The layout of sequences that are packed end to end."""

    sizes: tuple[int, ...]  # of the sequences
    positions: torch.Tensor  # [tokens and filling] position of each token in its sequence
    starts: torch.Tensor  # [sequences + 1] int32: where each starts, and then `tokens`

    @property
    def tokens(self) -> int:
        """Tokens without filling."""
        return sum(self.sizes)

    @property
    def longest(self) -> int:
        return max(self.sizes)

    @property
    def sequences(self) -> int:
        return len(self.sizes)

    @cached_property
    def _cuts(self) -> list[tuple[int, ...]]:
        """The sizes of the sequences of each grid."""
        ends = list(itertools.accumulate(grids_of(self.sizes)))
        return [self.sizes[begin:end] for begin, end in itertools.pairwise([0, *ends])]

    @cached_property
    def grids(self) -> list[Grid]:
        """The grids, made when they are first asked for: where one call computes all of attention, never."""
        return [_grid(sizes).to(self.positions.device) for sizes in self._cuts]

    @property
    def places(self) -> int:
        """Tokens that attention computes in grids, padding included."""
        return sum(len(sizes) * max(sizes) for sizes in self._cuts)

    def to(self, device: torch.device) -> Packing:
        """Return the packing with its tensors on a device."""
        return replace(self, positions=sent(self.positions, device), starts=sent(self.starts, device))


def pack_sequences(sizes: Sequence[int]) -> Packing:
    """Lay out sequences of these sizes in this order; sequences of similar size should be neighbours."""
    tokens = sum(sizes)
    positions = torch.zeros(padded_rows(tokens) if pays() else tokens, dtype=torch.long)
    positions[:tokens] = torch.cat([torch.arange(size) for size in sizes])
    starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
    return Packing(tuple(sizes), positions, starts)


def grids_of(sizes: Sequence[int]) -> list[int]:
    """Return how many sequences each grid has, so that grids and padding together cost least."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(sizes)]
    best, start = [0.0], [0]
    for end in range(1, len(runs) + 1):
        longest = count = held = 0
        least, first = math.inf, 0
        for begin in range(end - 1, -1, -1):
            size, times = runs[begin]
            longest, count, held = max(longest, size), count + times, held + size * times
            cost = best[begin] + GRID_COST + longest * count - held
            if cost < least:
                least, first = cost, begin
        best.append(least)
        start.append(first)
    found, end = [], len(runs)
    while end:
        found.append(sum(times for _, times in runs[start[end] : end]))
        end = start[end]
    return found[::-1]


def _grid(sizes: Sequence[int]) -> Grid:
    tokens, longest = sum(sizes), max(sizes)
    if tokens == len(sizes) * longest:
        return Grid(len(sizes), longest, tokens)
    start = torch.arange(len(sizes)) * longest
    from_grid = start.repeat_interleave(torch.tensor(sizes)) + torch.cat([torch.arange(n) for n in sizes])
    to_grid = torch.zeros(len(sizes) * longest, dtype=torch.long)
    to_grid[from_grid] = torch.arange(tokens)
    return Grid(len(sizes), longest, tokens, from_grid, to_grid)


class _ToGrid(torch.autograd.Function):
    """Map [heads, tokens, …] to [heads, grid, …]. Padding gets the values of some token, and no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.grid = grid
        return x.index_select(1, grid.to_grid)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.index_select(1, ctx.grid.from_grid), None


class _FromGrid(torch.autograd.Function):
    """Map [grid, …] to [tokens, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.grid = grid
        return x.index_select(0, grid.from_grid)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        grid: Grid = ctx.grid
        result = gradient.new_zeros(grid.sequences * grid.longest, *gradient.shape[1:])
        result[grid.from_grid] = gradient
        return result, None


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: object, *, packing: Packing, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention as transformers calls it, on [1, heads, tokens, size of a head]."""
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise UnsupportedAttention(
                f"the model's attention has {option}, which the trainer does not compute"
            )
    heads, rows = query.shape[1:3]
    window = options.get("sliding_window")
    at_once = (window is None or window >= packing.longest) and varlen_attention.fits(query)
    if key.shape[1] < heads and not (at_once and varlen_attention.takes_groups(query.device)):
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    filling = rows - packing.tokens
    if at_once:
        query, key, value = (x[0, :, : packing.tokens] for x in (query, key, value))
        found = [varlen_attention.varlen(query, key, value, packing.starts, packing.longest, scaling)]
    else:
        sizes = [*(grid.tokens for grid in packing.grids), filling]
        parts = zip(packing.grids, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=False)
        found = [_in_grid(grid, *of_grid, scaling=scaling, window=window) for grid, *of_grid in parts]
    if filling:
        found.append(found[0].new_zeros(filling, *found[0].shape[1:]))
    return (torch.cat(found) if len(found) > 1 else found[0])[None], None


def _in_grid(grid: Grid, *qkv: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
    """Compute a grid's attention, from [heads, tokens, size of a head] to [tokens, heads, size of a head]."""
    if grid.to_grid is not None:
        qkv = tuple(_ToGrid.apply(x, grid) for x in qkv)
    query, key, value = (x.unflatten(1, (grid.sequences, grid.longest)).transpose(0, 1) for x in qkv)
    near = None
    if window is not None and window < grid.longest:
        square = torch.ones(grid.longest, grid.longest, dtype=torch.bool, device=query.device)
        near = square.tril() & square.triu(1 - window)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=near, is_causal=near is None, scale=scaling
    )
    out = out.transpose(1, 2).flatten(0, 1)
    return out if grid.from_grid is None else _FromGrid.apply(out, grid)


def use_packed_attention(model: Any) -> None:
    """Make a transformers model compute attention this way; it then takes `packing` with its tokens."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)  # and no mask: so none is made
    model.set_attn_implementation(NAME)
