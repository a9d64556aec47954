"""Gives an element of an activation on a CPU the same bits, whichever rows are computed beside its own.

torch computes most elements of `silu`, `gelu` and `sigmoid` by vectors, and those at the end of a tensor, or
of a thread's part of it, one by one, which rounds otherwise. So bits depended on how many rows a step had,
where a layer was narrower than some vectors, or several threads shared it. Here all go through vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C import set_num_threads  # vLLM puts a function that does nothing in the place of torch's
from torch.nn import functional

_ALIGNED = 64  # elements; a multiple of what torch takes at once: two vectors of at most 32

Activation = Callable[[torch.Tensor], torch.Tensor]


def by_vectors(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of each element, with bits that depend on the element and its column alone."""
    width = x.shape[-1]
    if width % _ALIGNED:
        wide = x.new_zeros(*x.shape[:-1], width + -width % _ALIGNED)
        wide[..., :width] = x
        return by_vectors(activation, wide)[..., :width].contiguous()
    threads, onednn = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    set_num_threads(1)  # an activation takes some percent of its layer's time
    torch._C._set_mkldnn_enabled(False)  # oneDNN's gelu is another one, and torch takes it for a row alone
    try:
        return activation(x)
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        set_num_threads(threads)


class Functions:
    """In the place of torch.nn.functional in modules of vLLM."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return by_vectors(functional.silu, x)

    def gelu(self, x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return by_vectors(partial(functional.gelu, approximate=approximate), x)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return by_vectors(torch.sigmoid, x)


def use_vectors() -> None:
    """Have vLLM's own layers compute activations by vectors alone, in engines that are made from now on."""
    from vllm.model_executor.layers import activation
    from vllm.model_executor.models import qwen2_moe, qwen3_moe

    for module in (activation, qwen2_moe, qwen3_moe):
        module.F = Functions()


def use_vectors_in(model: torch.nn.Module) -> None:
    """Do the same for layers of torch and transformers: vLLM takes some kinds of models from there.

    A server's model comes here again with each generator that begins; its layers are changed once.
    """
    for layer in model.modules():
        is_plain = type(layer).__module__ in ("transformers.activations", "torch.nn.modules.activation")
        if is_plain and "forward" not in vars(layer):
            layer.forward = partial(by_vectors, layer.forward)
