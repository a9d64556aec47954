"""The loop of `fixed_point.py` for GPUs, in one pass, in Triton: no copies of the gradient in other types."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
# fp32 has no halves from 2^23 on: adding it to a smaller magnitude rounds that, halves to even numbers.
_WHOLE = tl.constexpr(float(1 << 23))


def add_and_clear_there(gradient: torch.Tensor, total: torch.Tensor, scale: float) -> torch.Tensor:
    """Add round(gradient * scale) to `total`, and set `gradient` to zero.

    Returns the gradient's largest magnitude; infinity if an element is NaN.
    """
    size = gradient.numel()
    programs = triton.cdiv(size, _BLOCK)
    most = torch.empty(programs, device=gradient.device)
    # Triton can't load rows of any other size in wide words, and four warps would have too few registers.
    warps = 4 if size % 16 == 0 else 8
    add_kernel[(programs,)](gradient, total, most, size, scale=scale, block=_BLOCK, num_warps=warps)
    return most.max()


@triton.jit
def add_kernel(gradient, total, most, size, scale: tl.constexpr, block: tl.constexpr):
    """Work on one block, and write down its largest magnitude."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < size
    given = tl.load(gradient + at, there, 0.0)
    magnitude = tl.abs(given) * scale
    whole = tl.where(magnitude < _WHOLE, (magnitude + _WHOLE) - _WHOLE, magnitude)
    units = tl.where(given < 0, -whole, whole).to(tl.int64)
    tl.store(total + at, tl.load(total + at, there, 0) + units, there)
    tl.store(gradient + at, tl.zeros_like(given), there)
    tl.store(most + tl.program_id(0), tl.max(tl.where(given == given, tl.abs(given), float("inf"))))
