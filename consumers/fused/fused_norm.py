"""RMSNorm in one pass forward and one backward: x / root(mean of squares) * weight, computed in fp32.

Each program of the backward pass adds up the weight's gradient over its own rows; these sums are added up
afterwards. No two programs write to one place, so the same rows give the same bits each time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from consumers.fused.launching import answer_type, power_of_two

_ELEMENTS = 4096  # of a program at a time
_PROGRAMS = 264  # of the backward pass: two for each multiprocessor of an H100


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of the last dimension's rows."""
    found: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return found


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.is_contiguous() else rows.contiguous()
        count, size = rows.shape
        found = torch.empty(rows.shape, dtype=answer_type(x, weight), device=x.device)
        inverse = torch.empty(count, dtype=torch.float32, device=x.device)
        block = power_of_two(size)
        at_once = max(1, _ELEMENTS // block)
        if count:
            norm_kernel[(triton.cdiv(count, at_once),)](
                rows, weight, found, inverse, count, size, eps=eps, rows=at_once, block=block,
                num_warps=_warps(block),
            )  # fmt: skip
        ctx.save_for_backward(rows, weight, inverse)
        return found.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        rows, weight, inverse = ctx.saved_tensors
        count, size = rows.shape
        given = gradient.reshape(-1, size)
        given = given if given.is_contiguous() else given.contiguous()
        found, block = torch.empty_like(rows), power_of_two(size)
        at_once = max(1, _ELEMENTS // block)
        programs = max(1, min(_PROGRAMS, triton.cdiv(count, at_once)))
        parts = torch.empty(programs, size, dtype=torch.float32, device=rows.device)
        norm_back_kernel[(programs,)](
            given, rows, weight, inverse, found, parts, count, size, rows_at_once=at_once, block=block,
            num_warps=_warps(block),
        )  # fmt: skip
        of_weight = parts.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return found.view(gradient.shape), of_weight, None


def _warps(block: int) -> int:
    """Return how many warps compute rows: of wide ones the registers of four would not hold their share."""
    return min(16, max(4, block // 1024))


@triton.jit
def norm_kernel(
    x, weight, y, inverse, count, size, eps: tl.constexpr, rows: tl.constexpr, block: tl.constexpr
):
    """Compute some rows."""
    row, at = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, block)
    there = (row < count)[:, None] & (at < size)[None, :]
    place = row.to(tl.int64)[:, None] * size + at[None, :]
    given = tl.load(x + place, there, 0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(given * given, 1) / size + eps)
    by = tl.load(weight + at, at < size, 0.0).to(tl.float32)
    tl.store(y + place, (given * scale[:, None] * by[None, :]).to(y.dtype.element_ty), there)
    tl.store(inverse + row, scale, row < count)


@triton.jit
def norm_back_kernel(
    gradient, x, weight, inverse, to, parts, count, size, rows_at_once: tl.constexpr, block: tl.constexpr
):
    """Compute the gradients of every so manyth group of rows, and this program's part of the weight's."""
    at = tl.arange(0, block)
    by = tl.load(weight + at, at < size, 0.0).to(tl.float32)
    total = tl.zeros((block,), tl.float32)
    step = tl.num_programs(0) * rows_at_once
    for first in range(tl.program_id(0) * rows_at_once, count, step):
        row = first + tl.arange(0, rows_at_once)
        there = (row < count)[:, None] & (at < size)[None, :]
        place = row.to(tl.int64)[:, None] * size + at[None, :]
        scale = tl.load(inverse + row, row < count, 0.0)[:, None]
        plain = tl.load(x + place, there, 0.0).to(tl.float32) * scale
        given = tl.load(gradient + place, there, 0.0).to(tl.float32)
        total += tl.sum(given * plain, 0)
        given = given * by[None, :]
        mean = tl.sum(given * plain, 1) / size
        tl.store(to + place, ((given - plain * mean[:, None]) * scale).to(to.dtype.element_ty), there)
    tl.store(parts + tl.program_id(0) * size + at, total, at < size)
