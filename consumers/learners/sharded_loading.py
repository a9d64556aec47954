"""Loads a model that no rank could hold: each reads its own rows of each weight from the files.

config ──► the model without weights ──► divided ──► each rank's rows, from mapped files
   └─────► a model of its first layers and few words, with weights ──► is it computed as transformers does?
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from consumers.batches import packing
from consumers.fused.fused_layers import Fitted, replace_fitted
from consumers.learners import forward
from consumers.learners.forward import UnsupportedModel
from consumers.learners.weight_rows import WeightRows
from infra.quiet import no_model_bars
from schemas.runspec import RunSpec

_WORDS = 256  # of the vocabulary of the model that is tried


def without_weights(folder: str, spec: RunSpec, device: torch.device) -> Any:
    """Return a model like `forward.load_policy`'s whose parameters are on the meta device.

    Raises UnsupportedModel.
    """
    from transformers import AutoConfig

    no_model_bars()
    config = AutoConfig.from_pretrained(folder)
    model = _on_meta(config)
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not layers:
        raise UnsupportedModel(
            f"model.path {folder}: {type(model).__name__} can't be shared out among ranks: its layers must "
            "be at `model.layers`. Set trainer.learner to torch, or trainer.zero_stage to 2"
        )
    fitted = _tried(folder, config, _different(layers, config), device, spec)
    packing.use_packed_attention(model)
    replace_fitted(model, fitted)
    forward.make_ready(model, spec, device)
    return model


def parameter_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by its first: tied parameters have several."""
    firsts, found = dict[int, str](), dict[str, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(firsts.setdefault(id(parameter), name), []).append(name)
    return found


def linear_layers(folder: str) -> list[str]:
    """Return the names of the linear layers of the model in a folder, but for the head."""
    from transformers import AutoConfig

    no_model_bars()
    model = _on_meta(AutoConfig.from_pretrained(folder))
    head = model.get_output_embeddings()
    return [
        name for name, layer in model.named_modules() if type(layer) is torch.nn.Linear and layer is not head
    ]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter of a module to the meta device as soon as it is made. Buffers stay as they are."""
    plain = torch.nn.Module.register_parameter

    def register(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        plain(self, name, parameter)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain


def _on_meta(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def _different(layers: torch.nn.ModuleList, config: Any) -> int:
    """Return how many of the first layers there must be so that each kind of layer is among them."""
    types = getattr(config.get_text_config(), "layer_types", None) or [""] * len(layers)
    kinds = [(kind, _structure(layer)) for kind, layer in zip(types, layers, strict=False)]
    return 1 + max(kinds.index(kind) for kind in kinds)


def _structure(layer: torch.nn.Module) -> list[object]:
    return [(type(module), [one.shape for one in module.parameters()]) for module in layer.modules()]


def _tried(folder: str, config: Any, layers: int, device: torch.device, spec: RunSpec) -> Fitted:
    """Try a model of the first layers, with their weights, over packed sequences; return what fits there.

    Raises UnsupportedModel.
    """
    small = copy.deepcopy(config)
    inner = small.get_text_config()
    inner.num_hidden_layers = layers
    inner.vocab_size = min(inner.vocab_size, _WORDS)
    inner.pad_token_id = None  # it may be beyond the vocabulary
    if getattr(inner, "layer_types", None):
        inner.layer_types = inner.layer_types[:layers]
    model = _on_meta(small)
    names = parameter_names(model)
    model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one.to(device))
    model.tie_weights()
    rows, parameters = WeightRows(folder), dict(model.named_parameters())
    with torch.no_grad():
        for first, all_names in names.items():
            shape = tuple(parameters[first].shape)
            parameters[first].copy_(rows.read(all_names, shape, 0, shape[0]))
        rows.read_buffers(model)
    if spec.model.follow_routes:
        forward.check_routers(model)
    try:
        return forward.adapt(model.eval(), folder)
    finally:
        model.to("meta")  # fused modules refer to themselves: without it their weights stay for a while


def fill(
    model: torch.nn.Module, parameters: Mapping[str, Any], names: Mapping[str, list[str]], folder: str
) -> None:
    """Read this rank's rows of each divided parameter. `names`: all names of each, see `parameter_names`."""
    rows = WeightRows(folder)
    with torch.no_grad():
        for name, shard in parameters.items():
            shard.local.copy_(rows.read(names[name], shard.shape, shard.first, shard.local.shape[0]))
        rows.read_buffers(model)
