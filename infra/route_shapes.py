"""Tells by a model's config which routes its samples have, for processes that don't load the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infra.model_config import count_in, read_config
from schemas.expert_routes import RouteShape
from schemas.runspec import RunSpec

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def followed_shape(model: str, spec: RunSpec) -> RouteShape | None:
    """Return the shape of the routes that a run's trainer follows; None if it follows none."""
    return route_shape(model) if spec.model.follow_routes else None


def route_shape(model: str) -> RouteShape | None:
    """Return the shape of the routes of the model in a folder; None if it is no mixture of experts."""
    try:
        return shape_in(read_config(Path(model)))
    except (OSError, ValueError):
        return None  # whoever loads the model says what is wrong with it


def shape_in(config: dict[str, Any]) -> RouteShape | None:
    """Like `route_shape`, for the content of a config.json."""
    experts = count_in(config, *EXPERTS)
    taken, layers = count_in(config, "num_experts_per_tok"), _layers(config)
    return RouteShape(layers, taken, experts) if experts and taken and layers else None


def _layers(config: dict[str, Any]) -> int:
    """Return how many layers have experts."""
    dense, every = config.get("mlp_only_layers") or [], count_in(config, "decoder_sparse_step") or 1
    return sum(
        layer not in dense and (layer + 1) % every == 0
        for layer in range(count_in(config, "num_hidden_layers"))
    )
