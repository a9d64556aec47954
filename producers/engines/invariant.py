"""Linear layers whose bits don't depend on the batch, on a CPU.

A BLAS picks its kernel by the number of rows, and another kernel may add in another order: then a sample's
logprobs depend on its neighbours. Products of exactly 8 rows always agree, at a price. Most BLAS builds give
the same bits for every multiple of 8 rows: where a probe of the very shape shows that, whole batches are
multiplied at once, padded to the next multiple, at no price.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

ROWS = 8
_WHOLE = 512  # largest batch that the probe vouches for


class InvariantLinear:
    """Stands for `torch.nn.functional.linear`."""

    def __init__(self) -> None:
        self._whole_batches: dict[tuple[int, int, bool], bool] = {}

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = weight.detach()
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        missing = -rows % ROWS
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing, flat.shape[1])])
        block = _WHOLE if self._whole(weight, bias) else ROWS
        if flat.shape[0] <= block:
            out = linear(flat, weight, bias)
        else:
            out = torch.cat([linear(part, weight, bias) for part in flat.split(block)])
        return out[:rows].reshape(*x.shape[:-1], weight.shape[0])

    def _whole(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        shape = (*weight.shape, bias is not None)
        known = self._whole_batches.get(shape)
        if known is None:
            known = self._whole_batches[shape] = agrees(weight, bias)
        return known


def agrees(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether every multiple of 8 rows gives the bits that 8 rows alone give, for weights of this shape."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(_WHOLE, weight.shape[1], generator=noise, dtype=torch.float32).to(weight.dtype)
    like = torch.randn(weight.shape, generator=noise, dtype=torch.float32).to(weight.dtype)
    alone = torch.cat([linear(part, like, bias) for part in x.split(ROWS)])
    return all(
        torch.equal(linear(x[:rows], like, bias), alone[:rows]) for rows in range(ROWS, _WHOLE + 1, ROWS)
    )
