"""Linear layers that are not trained, in a run that computes in bf16: less memory, the same bits.

in 16 bits   autocast would make these of the fp32 weights for each micro-batch
in 4 bits    if the weights are such that these say them exactly: `streamrl quantize` writes such models
"""

from __future__ import annotations

from typing import Any

import torch

from infra.weights.four_bits import FourBits, exactly


class HeldLinear(torch.nn.Linear):
    """A linear layer whose weights have no gradient. It computes as autocast does."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight`: in bf16."""
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", None if bias is None else torch.nn.Parameter(bias, False))
        bits = exactly(weight)
        self.register_buffer("held", weight if bits is None else None, persistent=False)
        self.register_buffer("codes", bits and bits.codes, persistent=False)
        self.register_buffer("largest", bits and bits.largest, persistent=False)

    def bf16(self) -> torch.Tensor:
        """Return the weights."""
        if self.held is not None:
            held: torch.Tensor = self.held
            return held
        assert isinstance(self.codes, torch.Tensor)
        assert isinstance(self.largest, torch.Tensor)
        return FourBits(self.codes, self.largest, (self.out_features, self.in_features)).whole()

    @property
    def weight(self) -> torch.Tensor:
        """The weights in fp32, the type in which peft is to make adapters."""
        return self.bf16().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = x.bfloat16(), None if self.bias is None else self.bias.bfloat16()
        if self.held is not None:
            return torch.nn.functional.linear(x, self.held, bias)
        found: torch.Tensor = _OfFourBits.apply(x, bias, self)
        return found


class _OfFourBits(torch.autograd.Function):
    """The weights are made whole twice, and never kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: HeldLinear) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.bf16(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.matmul(ctx.layer.bf16()), None, None
