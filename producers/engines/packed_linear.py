"""Linear layers of the engine on a CPU: packed for oneDNN, with results that don't depend on the batch.

vLLM packs weights when it has loaded them, and ignores later changes; here new weights are packed as well. A
kernel is picked by the number of rows, and another kernel may add in another order: then a sample's
log-probabilities depend on its neighbours. oneDNN gives the same bits for all padded numbers of rows, on the
machines seen so far. A probe with the layer's shape shows whether it does here; if not, blocks of exactly 8
rows are computed, which is slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from infra import choices
from infra.cpu_linear import pad_rows, padded_rows

PADDED_ROWS = 8
_WHOLE = 512  # largest batch that the probe checks
_KERNELS = 64  # that a layer keeps ready

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class PackedLayer(Protocol):
    """A layer that computes by a product which is made of its parameters, as they were then."""

    product: Product

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """The tensors that the product is made of."""

    def pack(self, *tensors: torch.Tensor) -> Product:
        """Return the product of what the parameters will be. It may be called in any thread."""


def packed(weight: torch.Tensor) -> Product:
    """Return a function that multiplies by this weight as it is now. It may be called in any thread."""
    import vllm._custom_ops as ops

    if choices.LINEAR.forced() == "mkl" or not ops._supports_onednn:
        return lambda x, bias: torch.nn.functional.linear(x, weight, bias)
    try:
        handler = ops.create_onednn_mm(weight.t(), _KERNELS)
    except RuntimeError:  # it has no bf16 for CPUs without AVX-512
        return lambda x, bias: torch.nn.functional.linear(x, weight, bias)
    return lambda x, bias: ops.onednn_mm(handler, x, bias)


class PackedLinear:
    """Computes one linear layer of the engine."""

    def __init__(
        self, layer: torch.nn.Module, *, invariant: bool, known: dict[tuple[object, ...], bool]
    ) -> None:
        self._layer, self._invariant, self._known = layer, invariant, known
        self.product = packed(self.parameters[0].data)

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        weight = self._layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        return (weight,)

    def pack(self, *tensors: torch.Tensor) -> Product:
        return packed(*tensors)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._invariant:
            return self.product(x, bias)
        return invariant_product(self.product, x, weight, bias, self._known)


def invariant_product(
    product: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    known: dict[tuple[object, ...], bool],
) -> torch.Tensor:  # fmt: skip
    """Multiply each row of `x` by a weight, with bits that don't depend on the other rows.

    `known`: what probes have shown, by the weight's shape.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    flat = pad_rows(flat)
    shape = (*weight.shape, weight.dtype, bias is not None)
    if shape not in known:
        known[shape] = agrees(product, weight.shape[1], x.dtype, bias)
    block = _WHOLE if known[shape] else PADDED_ROWS
    if flat.shape[0] <= block:
        out = product(flat, bias)
    else:
        out = torch.cat([product(part, bias) for part in flat.split(block)])
    return out[:rows].reshape(*x.shape[:-1], weight.shape[0])


def agrees(product: Product, width: int, dtype: torch.dtype, bias: torch.Tensor | None) -> bool:
    """Whether every padded number of rows of this width gives the bits that 8 rows give."""
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(_WHOLE, width, generator=noise, dtype=torch.float32).to(dtype)
    alone = torch.cat([product(part, bias) for part in x.split(PADDED_ROWS)])
    return all(
        torch.equal(product(x[:rows], bias), alone[:rows])
        for rows in sorted({padded_rows(rows) for rows in range(1, _WHOLE + 1)})
    )
