"""Logprobs of drawn tokens from hidden states, some rows at a time.

    states ──► logits, in the run's type ──► logprob, sum of exponentials, entropy     forward: one pass
    states ──► logits again ──► their gradient, in their place ──► two products        backward: one pass

Only a chunk of logits is ever in memory, and nothing as large as it in fp32. The weight's gradient is added
up in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from consumers.fused.launching import answer_type, runs_on

_BLOCK = 4096  # logits of a row at a time


def takes_head(head: torch.nn.Module, states: torch.Tensor) -> bool:
    """Return whether logits come from a plain linear layer that lies whole on this device."""
    return (
        runs_on(states.device)
        and type(head) is torch.nn.Linear
        and head.bias is None
        and not hasattr(head.weight, "ds_id")  # DeepSpeed may hold only a part of it
        and head.weight.device == states.device
    )


def fused_logprobs(
    states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, rows: int,
    barred: torch.Tensor, early: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return each target's logprob, and the entropy that it was drawn from.

    `early` says in which rows tokens of `barred` have no probability, unless one is the target.
    """
    logprobs, entropies = _Logprobs.apply(states, weight, targets, temperature, rows, barred, early)
    return logprobs, entropies


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
        rows: int, barred: torch.Tensor, early: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        dtype = answer_type(states, weight)
        plain, head = states.to(dtype), weight.to(dtype)
        logprobs, sums, entropies = (
            torch.empty(len(states), dtype=torch.float32, device=states.device) for _ in range(3)
        )
        with torch.autocast(states.device.type, enabled=False):
            for chunk in _chunks(len(states), rows):
                logits = _logits(plain[chunk], head, targets[chunk], barred, early[chunk])
                logprob_kernel[(len(logits),)](
                    logits, targets[chunk], logprobs[chunk], sums[chunk], entropies[chunk], logits.shape[1],
                    temperature=temperature, block=_BLOCK,
                )  # fmt: skip
        ctx.save_for_backward(plain, weight, targets, sums, barred, early)
        ctx.temperature, ctx.rows, ctx.given = temperature, rows, states.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        plain, weight, targets, sums, barred, early = ctx.saved_tensors
        head = weight.to(plain.dtype)
        of_states = torch.empty_like(plain)
        wanted = ctx.needs_input_grad[1]
        of_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted else None
        with torch.autocast(plain.device.type, enabled=False):
            for chunk in _chunks(len(plain), ctx.rows):
                logits = _logits(plain[chunk], head, targets[chunk], barred, early[chunk])
                count, size = logits.shape
                logprob_back_kernel[(count, triton.cdiv(size, _BLOCK))](
                    logits, targets[chunk], sums[chunk], gradient[chunk].contiguous(), size,
                    temperature=ctx.temperature, block=_BLOCK,
                )  # fmt: skip
                torch.mm(logits, head, out=of_states[chunk])
                if of_weight is not None:
                    of_weight += _product(logits.t(), plain[chunk])
        return of_states.to(ctx.given), of_weight, None, None, None, None, None


def _chunks(count: int, rows: int) -> list[slice]:
    return [slice(first, min(first + rows, count)) for first in range(0, count, rows)]


def _logits(
    states: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, barred: torch.Tensor, early: torch.Tensor
) -> torch.Tensor:
    logits = states @ head.t()
    if barred.numel():
        masked = early[:, None] & (targets[:, None] != barred)
        logits.index_copy_(1, barred, logits.index_select(1, barred).masked_fill_(masked, -torch.inf))
    return logits


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a product in fp32; on a GPU fp32 is what it is added up in anyway."""
    if one.is_cuda and one.dtype != torch.float32:
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.float() @ other.float()


@triton.jit
def logprob_kernel(
    logits, targets, logprobs, sums, entropies, size, temperature: tl.constexpr, block: tl.constexpr
):
    """Compute a row's logprob, the logarithm of its sum of exponentials, and its entropy."""
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * size
    most, total, weighted = -1e30, 0.0, 0.0
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        value = tl.load(mine + at, at < size, float("-inf")).to(tl.float32) / temperature
        now = tl.maximum(most, tl.max(value))
        shrunk, part = tl.exp(most - now), tl.exp(value - now)
        total = total * shrunk + tl.sum(part)
        weighted = weighted * shrunk + tl.sum(tl.where(part > 0, part * value, 0.0))
        most = now
    whole = most + tl.log(total)
    own = tl.load(mine + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, own - whole)
    tl.store(sums + row, whole)
    tl.store(entropies + row, whole - weighted / total)


@triton.jit
def logprob_back_kernel(
    logits, targets, sums, gradient, size, temperature: tl.constexpr, block: tl.constexpr
):
    """Put the gradients of a part of a row's logits in their place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    place, there = logits + row * size + at, at < size
    value = tl.load(place, there, float("-inf")).to(tl.float32) / temperature
    share = tl.exp(value - tl.load(sums + row))
    own = tl.where(at == tl.load(targets + row), 1.0, 0.0)
    found = tl.load(gradient + row) * (own - share) / temperature
    tl.store(place, found.to(logits.dtype.element_ty), there)
