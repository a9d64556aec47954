"""Rotary position embeddings in one pass: halves of a head are turned by the angles of their position.

The gradient is turned back by the same angles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from consumers.fused.launching import answer_type, power_of_two


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [1, heads, tokens, size of a head] turned by angles of [1, tokens, size of a head]."""
    found: torch.Tensor = _Rotated.apply(x, cos, sin)
    return found


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _turned(x, cos, sin, answer_type(x, cos), back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, ctx.dtype, back=True), None, None


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, *, back: bool
) -> torch.Tensor:
    x = x if x.stride(3) == 1 else x.contiguous()
    _, heads, tokens, size = x.shape
    # By tokens, as linear layers make and take it: what follows needs no copy.
    found = torch.empty(1, tokens, heads, size, dtype=dtype, device=x.device).transpose(1, 2)
    if x.numel():
        turn_kernel[(tokens,)](
            x, cos, sin, found, heads, x.stride(1), x.stride(2), half=size // 2,
            head_block=power_of_two(heads), half_block=power_of_two(size // 2), back=back,
        )  # fmt: skip
    return found


@triton.jit
def turn_kernel(
    x, cos, sin, to, heads, of_head, of_token, half: tl.constexpr, head_block: tl.constexpr,
    half_block: tl.constexpr, back: tl.constexpr,
):  # fmt: skip
    """Turn all heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.arange(0, head_block)[:, None].to(tl.int64), tl.arange(0, half_block)[None, :]
    there = (head < heads) & (at < half)
    angles = token * 2 * half + at
    cos_low = tl.load(cos + angles, at < half, 0.0).to(tl.float32)
    sin_low = tl.load(sin + angles, at < half, 0.0).to(tl.float32)
    cos_high = tl.load(cos + angles + half, at < half, 0.0).to(tl.float32)
    sin_high = tl.load(sin + angles + half, at < half, 0.0).to(tl.float32)
    given = x + token * of_token + head * of_head + at
    low, high = tl.load(given, there, 0.0).to(tl.float32), tl.load(given + half, there, 0.0).to(tl.float32)
    if back:
        turned_low, turned_high = low * cos_low + high * sin_high, high * cos_high - low * sin_low
    else:
        turned_low, turned_high = low * cos_low - high * sin_low, high * cos_high + low * sin_high
    place = to + (token * heads + head) * 2 * half + at
    tl.store(place, turned_low.to(to.dtype.element_ty), there)
    tl.store(place + half, turned_high.to(to.dtype.element_ty), there)
