"""Linear layers on a CPU in fp32, computed by oneDNN, forward and backward.

Torch leaves fp32 products to MKL, which uses half of the vector units of a CPU that is not Intel's: 112
against 240 GFLOP/s on one core of an AMD EPYC with AVX-512. oneDNN takes 2 ms to make a kernel for each
number of rows, so rows are padded to one of a few numbers. On Intel's own CPUs MKL is faster: a training step
takes 20 % less time, since MKL needs no copies for the gradient of the weights.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear

from infra import choices


def padded_rows(rows: int) -> int:
    """Return the next of 8, 16, … 128, 144, … 256, 288, …: beyond 64 rows, at most an eighth more."""
    step = 8
    while step * 16 < rows:
        step *= 2
    return -(-rows // step) * step


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Append rows of zeros until the number of rows is a padded one."""
    missing = padded_rows(x.shape[0]) - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x @ weight.T + bias` for matrices; not differentiable. Other dtypes than fp32 go to torch."""
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return torch_linear(x, weight, bias)
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        flat = pad_rows(x.reshape(-1, x.shape[-1]))
        ctx.save_for_backward(flat if ctx.needs_input_grad[1] else None, weight)  # no use for frozen weights
        return product(flat, weight, bias)[: x[..., 0].numel()].view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        flat, weight = ctx.saved_tensors
        rows = gradient[..., 0].numel()
        upper = pad_rows(gradient.reshape(rows, -1))
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = product(upper, weight.t())[:rows].view(*gradient.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            of_weight = product(upper.t(), flat.t())
        if ctx.needs_input_grad[2]:
            of_bias = upper.sum(0)
        return of_x, of_weight, of_bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Like `torch.nn.functional.linear`, differentiable. Torch does all but fp32, also bf16 by autocast."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return torch_linear(x, weight, bias)
    result: torch.Tensor = _Linear.apply(x, weight, bias)
    return result


def pays() -> bool:
    """Return whether to use oneDNN: as STREAMRL_LINEAR says, else on every CPU that is not Intel's."""
    said = choices.LINEAR.forced()
    return said == "onednn" if said else not _intel()


@cache
def _intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # no Linux: torch knows best


def _compute(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight, layer.bias)


def use_cpu_linear(model: torch.nn.Module, *, most_rows: int) -> None:
    """Make all linear layers of a model compute this way. Prepare kernels for up to `most_rows` rows."""
    shapes: set[tuple[int, int, bool]] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            shapes.add((module.out_features, module.in_features, module.bias is not None))
            module.forward = MethodType(_compute, module)  # a copy of the model gets a method of its own
    counts = sorted({padded_rows(rows) for rows in range(1, most_rows + 1)})
    for (wide, narrow, biased), rows in itertools.product(sorted(shapes), counts):
        weight = torch.zeros(wide, narrow, requires_grad=True)
        bias = torch.zeros(wide, requires_grad=True) if biased else None
        linear(torch.zeros(rows, narrow, requires_grad=True), weight, bias).sum().backward()
