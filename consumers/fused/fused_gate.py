"""The gate of a model's feed-forward layers in one pass: silu(gate) * up. Backward it is one pass as well."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # elements


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, in the type of `gate`."""
    found: torch.Tensor = _Gated.apply(gate, up)
    return found


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        found = torch.empty_like(gate)
        if gate.numel():
            gate_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, found, gate.numel(), block=_BLOCK)
        ctx.save_for_backward(gate, up)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        if gate.numel():
            gate_back_kernel[(triton.cdiv(gate.numel(), _BLOCK),)](
                gradient.contiguous(), gate, up, of_gate, of_up, gate.numel(), block=_BLOCK
            )
        return of_gate, of_up


@triton.jit
def gate_kernel(gate, up, to, size, block: tl.constexpr):
    """Compute a block."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < size
    by = tl.load(gate + at, there, 0.0).to(tl.float32)
    found = by / (1.0 + tl.exp(-by)) * tl.load(up + at, there, 0.0).to(tl.float32)
    tl.store(to + at, found.to(to.dtype.element_ty), there)


@triton.jit
def gate_back_kernel(gradient, gate, up, of_gate, of_up, size, block: tl.constexpr):
    """Compute a block of both gradients."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    there = at < size
    given = tl.load(gradient + at, there, 0.0).to(tl.float32)
    by = tl.load(gate + at, there, 0.0).to(tl.float32)
    other = tl.load(up + at, there, 0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-by))
    tl.store(of_up + at, (given * by * share).to(of_up.dtype.element_ty), there)
    slope = share * (1.0 + by * (1.0 - share))
    tl.store(of_gate + at, (given * other * slope).to(of_gate.dtype.element_ty), there)
