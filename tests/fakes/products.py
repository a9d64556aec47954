"""`python -m tests.fakes.products [engine|int8]`: fails if layers compute wrongly on this processor."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from infra import cpu_linear

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def products(whose: str) -> list[Product]:
    """The trainer's, the engine's, or the engine's with weights in eight bits."""
    if whose == "trainer":
        return [cpu_linear.product, cpu_linear.linear]
    if whose == "int8":
        from producers.engines.eight_bit_linear import integer_product, rounded_weight

        return [lambda x, weight: integer_product(*rounded_weight(weight, "int8"), x.dtype)(x, None)]
    from producers.engines.packed_linear import packed

    return [lambda x, weight: packed(weight)(x, None)]


def main(whose: str = "trainer") -> None:
    """Compare with products in float64."""
    noise = torch.Generator().manual_seed(0)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, weight = (torch.randn(size, 48, generator=noise).to(dtype) for size in (24, 40))
        if whose == "int8":  # the largest numbers of eight bits, which nothing rounds
            x, weight = x.sign() * 127, weight.sign() * 127
        exact = x.double() @ weight.double().t()
        for product in products(whose):
            torch.testing.assert_close(product(x, weight).double(), exact, rtol=near, atol=near * 10)


if __name__ == "__main__":
    main(*sys.argv[1:])
