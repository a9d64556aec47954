"""Rows of a tensor, each picked at most once. On GPUs their gradient is picked too, and not added up."""

from __future__ import annotations

from typing import Any

import torch


def chosen_rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows at these places, of which no two are the same."""
    if not x.is_cuda:
        return x.index_select(0, places)
    found: torch.Tensor = _Picked.apply(x, places)
    return found


class _Picked(torch.autograd.Function):
    """Repeatable additions at given places sort the places first, which takes long on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,) = ctx.saved_tensors
        source = places.new_full((ctx.count,), len(places))
        source[places] = torch.arange(len(places), device=places.device)
        return torch.cat([gradient, gradient.new_zeros(1, *gradient.shape[1:])]).index_select(0, source), None
