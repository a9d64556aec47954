"""Attention of sequences that lie end to end, in one call: torch has a kernel for it on GPUs, in 16 bits.

Grids (`packing.py`) need no such kernel, but one call each, and on GPUs a plan for each new shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from infra import choices

_WIDEST = 256  # elements of a head: the kernel takes multiples of eight up to so many


def fits(query: torch.Tensor) -> bool:
    """Return whether there is a kernel for such queries."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and _dtype(query) in (torch.bfloat16, torch.float16)
        and size % 8 == 0
        and size <= _WIDEST
        and _call() is not None
        and not choices.ATTENTION.forced()
    )


def varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int,
    scaling: float | None,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention, from [heads, tokens, size of a head] to [tokens, heads, size of a head].

    `starts`: where each sequence starts, and then the number of all tokens.
    """
    call = _call()
    assert call is not None, "fits() was asked"
    given = (x.transpose(0, 1).to(_dtype(query)) for x in (query, key, value))
    found: torch.Tensor = call(*given, starts, starts, longest, longest, scale=scaling)
    return found


@cache
def takes_groups(device: torch.device) -> bool:
    """Return whether the kernel takes fewer keys and values than queries, forward and backward, as tried.

    It is tried within the first layer's forward pass. With gradient_checkpointing that counts the tensors
    which are saved, and the trial's, which are not there when the layer is computed again, must not count.
    The first pass may be one that only scores, without gradients.
    """
    with torch.enable_grad(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return _tried(device)


def _tried(device: torch.device) -> bool:
    starts = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    found = []
    for grouped in (False, True):
        draw = torch.Generator().manual_seed(0)
        qkv = [
            torch.randn(heads, 8, 64, generator=draw).to(device, torch.bfloat16).requires_grad_()
            for heads in (4, 2, 2)
        ]
        query, key, value = qkv
        if not grouped:
            key, value = (x.repeat_interleave(2, dim=0) for x in (key, value))
        try:
            out = varlen(query, key, value, starts, 5, None)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), qkv)])
        except torch.OutOfMemoryError:
            raise  # it says nothing of the kernel
        except (RuntimeError, ValueError):
            return False
    return all(
        torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.05)
        for one, other in zip(*found, strict=True)
    )


def _dtype(query: torch.Tensor) -> torch.dtype:
    """Return the type in which it is computed: within autocast not that of the queries."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


@cache
def _call() -> Callable[..., Any] | None:
    """Return torch's call, as causal attention; None if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "enable_gqa" in parameters:
        varlen_attn = partial(varlen_attn, enable_gqa=True)
    if "is_causal" in parameters:  # up to torch 2.11
        return partial(varlen_attn, is_causal=True)
    return partial(varlen_attn, window_size=(-1, 0))
