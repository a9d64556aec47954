"""Gives a transformers model fused norms, gates and rotations, where they compute what its own code does.

Models name these parts alike, but not all compute alike: some norms add 1 to their weight. So one module of
each class is tried on random numbers first; a class that differs keeps its own code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from consumers.fused.fused_gate import gated
from consumers.fused.fused_norm import rms_norm
from consumers.fused.fused_rotation import rotated
from consumers.fused.launching import runs_on

_NEAR = 1e-4  # largest difference, of numbers about as large as 1
_ROTATION = "apply_rotary_pos_emb"  # models' modules have it under this name
_OF_ROTATION = ["q", "k", "cos", "sin", "unsqueeze_dim"]


Fitted = dict[type, Callable[..., Any] | None]  # by class: the fused forward that computes what it does


def use_fused_layers(model: torch.nn.Module) -> Fitted:
    """Replace the code of modules that compute the same; on a CPU nothing is. Return what was found out."""
    device = next(model.parameters()).device
    if not runs_on(device):
        return {}
    tried: Fitted = {}
    for module in model.modules():
        if type(module) not in tried:
            tried[type(module)] = _fitting(module)
    replace_fitted(model, tried)
    for source in {type(module).__module__ for module in model.modules()}:
        _fuse_rotation(sys.modules[source], device)
    return tried


def replace_fitted(model: torch.nn.Module, tried: Fitted) -> None:
    """Replace the code of modules whose classes were tried before; they need no weights yet."""
    for module in model.modules():
        forward = tried.get(type(module))
        if forward is not None:
            module.forward = MethodType(forward, module)


def _fitting(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the fused forward of a module's class, if it computes what the module does."""
    for forward, width in _candidates(module):
        weight = next(module.parameters())
        draw = torch.Generator("cpu").manual_seed(0)
        probe = torch.randn(3, width, generator=draw, device="cpu").to(weight.device, weight.dtype)
        with torch.no_grad():
            own, fused = module(probe), forward(module, probe)
        if own.shape == fused.shape and float((own - fused).abs().max()) <= _NEAR * max(
            1.0, float(own.abs().max())
        ):
            return forward
    return None


def _candidates(module: Any) -> Iterator[tuple[Callable[..., Any], int]]:
    """Yield the fused forward that a module's attributes suggest, and the width that it takes."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.nn.Parameter) and weight.dim() == 1 and not hasattr(module, "bias"):
        for eps in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, eps, None), float):
                yield (_norm_with_epsilon if eps == "variance_epsilon" else _norm_with_eps), weight.numel()
    if isinstance(getattr(module, "act_fn", None), torch.nn.Module) and all(
        isinstance(getattr(module, name, None), torch.nn.Linear)
        for name in ("gate_proj", "up_proj", "down_proj")
    ):
        yield _gated_layer, module.gate_proj.in_features


def _norm_with_epsilon(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, self.weight, self.variance_epsilon)


def _norm_with_eps(self: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, self.weight, self.eps)


def _gated_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
    return found


def _fuse_rotation(source: Any, device: torch.device) -> None:
    """Replace the function by which a module of transformers turns queries and keys."""
    own = getattr(source, _ROTATION, None)
    if own is None or hasattr(own, "unfused") or list(inspect.signature(own).parameters) != _OF_ROTATION:
        return

    def turned(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if unsqueeze_dim != 1 or not (_turns(q, cos, sin) and _turns(k, cos, sin)):
            found: tuple[torch.Tensor, torch.Tensor] = own(q, k, cos, sin, unsqueeze_dim)
            return found
        return rotated(q, cos, sin), rotated(k, cos, sin)

    draw = torch.Generator("cpu").manual_seed(0)
    q, k = (torch.randn(1, heads, 5, 16, generator=draw, device="cpu").to(device) for heads in (3, 2))
    angles = torch.randn(1, 5, 8, generator=draw, device="cpu").to(device).repeat(1, 1, 2)
    probe = q, k, angles.cos(), angles.sin()
    pairs = zip(own(*probe), turned(*probe), strict=True)
    if all(one.shape == other.shape and torch.allclose(one, other, atol=_NEAR) for one, other in pairs):
        turned.unfused = own  # type: ignore[attr-defined]
        setattr(source, _ROTATION, turned)


def _turns(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Return whether the kernel takes these tensors."""
    return (
        runs_on(x.device)
        and x.dim() == 4
        and x.shape[0] == 1
        and x.shape[3] % 2 == 0
        and cos.shape == sin.shape == (1, x.shape[2], x.shape[3])
    )
