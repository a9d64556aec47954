"""`python -m tests.fakes.products`: fails if linear layers compute wrongly on this processor."""

from __future__ import annotations

import torch

from infra import cpu_linear


def main() -> None:
    """Compare with products in float64."""
    noise = torch.Generator().manual_seed(0)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, weight = (torch.randn(size, 48, generator=noise).to(dtype) for size in (24, 40))
        exact = x.double() @ weight.double().t()
        for found in (cpu_linear.product(x, weight), cpu_linear.linear(x, weight)):
            torch.testing.assert_close(found.double(), exact, rtol=near, atol=near * 10)


if __name__ == "__main__":
    main()
