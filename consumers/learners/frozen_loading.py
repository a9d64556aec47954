"""Loads models that are not trained: an adapter's base, and the reference of a loss.

In a run that computes in bf16 they are read tensor by tensor, and never whole in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from consumers.learners import forward
from consumers.learners.forward import UnsupportedModel
from consumers.learners.held_linear import HeldLinear
from consumers.learners.sharded_loading import parameter_names, without_weights
from consumers.learners.weight_rows import WeightRows
from schemas.runspec import RunSpec


def load_frozen(folder: str, spec: RunSpec, device: torch.device) -> Any:
    """Load a causal language model without gradients that computes what `load_policy`'s does."""
    if spec.model.dtype == "bfloat16":
        try:
            return _held(folder, spec, device)
        except UnsupportedModel:
            pass  # its tensors can't be read one by one, or it can't be trained: that is said now
    return forward.load_policy(folder, spec, device).requires_grad_(False)


def _held(folder: str, spec: RunSpec, device: torch.device) -> Any:
    model = without_weights(folder, spec, device).requires_grad_(False)
    names, rows, read = parameter_names(model), WeightRows(folder), set[str]()

    def whole(name: str, shape: torch.Size) -> torch.Tensor:
        read.add(name)
        return rows.read(names[name], tuple(shape), 0, shape[0]).to(device)

    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        name = f"{path}.weight"
        if type(layer) is not torch.nn.Linear or names.get(name) != [name]:
            continue
        weight = whole(name, layer.weight.shape).bfloat16()
        if layer is head:  # fused logprobs take a plain one
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            continue
        bias = None if layer.bias is None else whole(f"{path}.bias", layer.bias.shape).float()
        model.set_submodule(path, HeldLinear(weight, bias))
    model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device))
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if name not in read:
            parameter.data.copy_(whole(name, parameter.shape))
    rows.read_buffers(model)
    return model
