"""Loads a model for ZeRO-3: each weight is read, divided among the ranks and dropped before the next one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from consumers.learners.forward import call_head_once
from consumers.learners.sharded_loading import parameter_names, without_weights
from consumers.learners.weight_rows import WeightRows
from schemas.runspec import RunSpec


def divided_by_zero(
    folder: str, spec: RunSpec, device: torch.device, deepspeed: ModuleType, config: dict[str, Any]
) -> Any:
    """Return the model in a folder, of each of whose weights this rank has a part. All ranks take part."""
    model = without_weights(folder, spec, device)
    rows, modules, parameters = (
        WeightRows(folder),
        dict(model.named_modules()),
        dict(model.named_parameters()),
    )
    divided: list[Any] = []
    for first, names in parameter_names(model).items():
        shape = tuple(parameters[first].shape)
        whole = torch.nn.Parameter(rows.read(names, shape, 0, shape[0]).to(device, torch.float32))
        for place in names:  # several of a tied weight
            module, _, own_name = place.rpartition(".")
            modules[module]._parameters[own_name] = whole
        if divided:
            divided[0].convert_to_zero_parameters(param_list=[whole])
        else:
            deepspeed.zero.Init(module=torch.nn.ParameterList([whole]), config_dict_or_path=config)
        divided.append(whole)
    rows.read_buffers(model)
    for module in modules.values():
        for own_name, buffer in module.named_buffers(recurse=False):
            module._buffers[own_name] = buffer.to(device)
    call_head_once(model.lm_head)
    return model
