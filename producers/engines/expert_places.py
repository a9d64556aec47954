"""Finds the weights of a mixture of experts in vLLM's parameters, which hold all experts of a layer.

w13_weight [experts, gate then up, width]      w2_weight [experts, width, inner]

A rank of several has its experts alone, or all with its slices of `inner`.

vLLM has them where it computes with them, on CPUs too (`plain_experts.py`). A tensor's place is contiguous,
so it is written in place and hashed like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from infra.weights.expert_names import DOWN, expert_tensor, names_in_folders

ParameterIndex = slice | tuple[int | slice, ...]  # the index of a tensor in its parameter
_PADDED = "vLLM has padded these weights, so the ones that it computes with can't be verified"


def place_of_experts(
    name: str,
    shape: Sequence[int],
    parameters: Mapping[str, torch.Tensor],
    refuse: Callable[[str], Exception],
    first_expert: int = 0,
) -> tuple[str, ParameterIndex] | None:
    """Return the parameter that a tensor lies in and its index there; None if it is none of these.

    `refuse`: makes the error for a tensor whose place can't be one; `first_expert`: that is held here.
    """
    found = expert_tensor(name)
    if found is None:
        renamed = _under(name, parameters)
        return None if renamed is None else (renamed, slice(shape[0]) if shape else ())
    part = "w2_weight" if found.whole == DOWN else "w13_weight"
    parameter = _under(f"{found.layer}.routed_experts.{part}", parameters)
    if parameter is None:
        return None
    held = tuple(parameters[parameter].shape)
    if found.expert is None:
        if held != tuple(shape):
            raise refuse(f"it is {list(shape)}, and {list(held)} in the engine: {_PADDED}")
        return parameter, slice(held[0])
    rows = held[1] if found.half is None else held[1] // 2
    expert = found.expert - first_expert
    if not 0 <= expert < held[0]:
        first = f" from {first_expert} on" if first_expert else ""
        raise refuse(f"it is of expert {found.expert}, and the engine has {held[0]}{first}")
    if (rows, *held[2:]) != tuple(shape):
        raise refuse(f"it is {list(shape)}, and {[rows, *held[2:]]} in the engine: {_PADDED}")
    begin = rows * (found.half or 0)
    return parameter, (expert, slice(begin, begin + rows))


def _under(name: str, parameters: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name under which vLLM has a parameter; None if it has none."""
    return next((one for one in names_in_folders(name) if one in parameters), None)
