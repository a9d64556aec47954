"""Linear layers of the engine on a CPU: packed for oneDNN, and with bits that don't depend on the batch.

vLLM packs weights when it has loaded them, and forgets that they change; here every load packs them again.
A kernel is picked by the number of rows, and another kernel may add in another order: then a sample's
logprobs depend on its neighbours. oneDNN gives the same bits for all padded numbers of rows, on the machines
seen so far; a probe of the very shape shows whether it does here. Where it doesn't, blocks of exactly 8
rows do, at a price.
"""

from __future__ import annotations

import torch

from infra.cpu_linear import pad_rows, padded_rows

ROWS = 8
_WHOLE = 512  # largest batch that the probe vouches for
_KERNELS = 64  # that a layer keeps at hand


class PackedLinear:
    """Computes one layer of the engine."""

    def __init__(
        self, layer: torch.nn.Module, *, invariant: bool, known: dict[tuple[object, ...], bool]
    ) -> None:
        self._layer, self._invariant, self._known = layer, invariant, known
        self.pack()

    def pack(self) -> None:
        """Take over the layer's weights as they are now."""
        import vllm._custom_ops as ops

        weight = self._layer.weight
        assert isinstance(weight, torch.Tensor)
        self._rows_out = weight.shape[0]
        if ops._supports_onednn:
            handler = ops.create_onednn_mm(weight.detach().t(), _KERNELS)
            self._product = lambda x, bias: ops.onednn_mm(handler, x, bias)
        else:
            self._product = lambda x, bias: torch.nn.functional.linear(x, weight, bias)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._invariant:
            return self._product(x, bias)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        flat = pad_rows(flat)
        block = _WHOLE if self._whole(weight, bias) else ROWS
        if flat.shape[0] <= block:
            out = self._product(flat, bias)
        else:
            out = torch.cat([self._product(part, bias) for part in flat.split(block)])
        return out[:rows].reshape(*x.shape[:-1], self._rows_out)

    def _whole(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        shape = (*weight.shape, weight.dtype, bias is not None)
        if shape not in self._known:
            self._known[shape] = self.agrees(weight, bias)
        return self._known[shape]

    def agrees(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether every padded number of rows gives the bits that 8 rows give, for this layer's shape."""
        noise = torch.Generator().manual_seed(0)
        x = torch.randn(_WHOLE, weight.shape[1], generator=noise, dtype=torch.float32).to(weight.dtype)
        alone = torch.cat([self._product(part, bias) for part in x.split(ROWS)])
        return all(
            torch.equal(self._product(x[:rows], bias), alone[:rows])
            for rows in sorted({padded_rows(rows) for rows in range(1, _WHOLE + 1)})
        )
