"""Sequences end to end: what is computed token by token has no padding; attention alone sees a padded grid.

tokens     a a a b b c c c c · ·      · fills up to a number of rows that has a kernel
positions  0 1 2 0 1 0 1 2 3 0 0
grid       a a a ·
           b b · ·                    causal: no real token sees what stands behind it
           c c c c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from infra.cpu_linear import padded_rows
from infra.errors import Explained

NAME = "streamrl_packed"  # of this attention, among those of transformers


class UnsupportedAttention(Explained):
    """The model's attention does something that is not computed here."""


@dataclass(frozen=True)
class Packing:
    """Where each token stands."""

    sequences: int
    longest: int
    tokens: int  # without those that fill up
    positions: torch.Tensor  # [tokens and filling] of each in its sequence
    from_grid: torch.Tensor  # [tokens and filling] the place in the grid of each
    to_grid: torch.Tensor  # [sequences * longest] the token at each place; any where there is none

    def to(self, device: torch.device) -> Packing:
        """On a device."""
        moved = [tensor.to(device) for tensor in (self.positions, self.from_grid, self.to_grid)]
        return Packing(self.sequences, self.longest, self.tokens, *moved)


def pack(sizes: Sequence[int]) -> Packing:
    """Places of sequences of these lengths."""
    tokens, longest = sum(sizes), max(sizes)
    rows = padded_rows(tokens)
    positions = torch.zeros(rows, dtype=torch.long)
    positions[:tokens] = torch.cat([torch.arange(size) for size in sizes])
    from_grid = torch.zeros(rows, dtype=torch.long)
    start = torch.arange(len(sizes)) * longest
    from_grid[:tokens] = start.repeat_interleave(torch.tensor(sizes)) + positions[:tokens]
    to_grid = torch.zeros(len(sizes) * longest, dtype=torch.long)
    to_grid[from_grid[:tokens]] = torch.arange(tokens)
    return Packing(len(sizes), longest, tokens, positions, from_grid, to_grid)


class _ToGrid(torch.autograd.Function):
    """[heads, tokens, …] to [heads, grid, …]. Empty places get some token, and have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        ctx.packing = packing
        return x.index_select(1, packing.to_grid)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = gradient.index_select(1, ctx.packing.from_grid)
        result[:, ctx.packing.tokens :] = 0  # the filling is no place of the grid
        return result, None


class _FromGrid(torch.autograd.Function):
    """[grid, …] to [tokens, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        ctx.packing = packing
        return x.index_select(0, packing.from_grid)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        packing: Packing = ctx.packing
        result = gradient.new_zeros(packing.to_grid.shape[0], *gradient.shape[1:])
        result[packing.from_grid[: packing.tokens]] = gradient[: packing.tokens]
        return result, None


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: object, *, packing: Packing, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as transformers calls it, on [1, heads, tokens, size of a head]."""
    for option in ("softcap", "s_aux"):
        if options.get(option) is not None:
            raise UnsupportedAttention(
                f"the model's attention has {option}, which the trainer does not compute"
            )
    heads, rows = query.shape[1:3]
    query, key, value = (
        _ToGrid.apply(x[0], packing).unflatten(1, (packing.sequences, packing.longest)).transpose(0, 1)
        for x in (query, key, value)
    )
    if key.shape[1] < heads:
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    window = options.get("sliding_window")
    near = None
    if window is not None and window < packing.longest:
        square = torch.ones(packing.longest, packing.longest, dtype=torch.bool, device=query.device)
        near = square.tril() & square.triu(1 - window)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=near, is_causal=near is None, scale=scaling
    )
    return _FromGrid.apply(out.transpose(1, 2).flatten(0, 1).flatten(1), packing).view(
        1, rows, heads, -1
    ), None


def use_in(model: Any) -> None:
    """Let a transformers model compute attention this way; it then takes `packing` with its tokens."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
