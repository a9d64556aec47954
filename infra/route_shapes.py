"""Tells by a model's config which routes its samples have, for processes that don't load the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schemas.expert_routes import RouteShape
from schemas.runspec import RunSpec

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LARGEST_CONFIG = 8 << 20  # bytes


def followed_shape(model: str, spec: RunSpec) -> RouteShape | None:
    """Return the shape of the routes that a run's trainer follows; None if it follows none."""
    return route_shape(model) if spec.model.follow_routes else None


def route_shape(model: str) -> RouteShape | None:
    """Return the shape of the routes of the model in a folder; None if it is no mixture of experts."""
    file = Path(model) / "config.json"
    if not file.is_file() or file.stat().st_size > _LARGEST_CONFIG:
        return None
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return None  # whoever loads the model says what is wrong with it
    return shape_in(config) if isinstance(config, dict) else None


def shape_in(config: dict[str, Any]) -> RouteShape | None:
    """Like `route_shape`, for the content of a config.json."""
    experts = next((count for key in _EXPERTS if (count := _count(config, key))), 0)
    taken, layers = _count(config, "num_experts_per_tok"), _layers(config)
    return RouteShape(layers, taken, experts) if experts and taken and layers else None


def _layers(config: dict[str, Any]) -> int:
    """Return how many layers have experts."""
    dense, every = config.get("mlp_only_layers") or [], _count(config, "decoder_sparse_step") or 1
    return sum(
        layer not in dense and (layer + 1) % every == 0
        for layer in range(_count(config, "num_hidden_layers"))
    )


def _count(config: dict[str, Any], key: str) -> int:
    found = config.get(key)
    return found if isinstance(found, int) and 0 < found < 1 << 16 else 0
