"""Brings the routes of a mixture's layers together on all ranks: each has those of its own stretch of layers.

rank 0   layers 0 1 · ·  ──┐
rank 1   layers · · 2 3  ──┴─ sum, where each has zeros for the others' layers ──► layers 0 1 2 3 on both
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from producers.engines.engine import lasting_error


class RoutedLayers(NamedTuple):
    """The layers with experts that a rank has routers of, among those of the whole model."""

    first: int
    all: int
    taken: int  # experts by each token
    experts: int
    stretches: int = 1  # of all layers, also of those without experts


def routed_layers(routers: Sequence[Any]) -> RoutedLayers | None:
    """Return the place of a rank's routers; None if the model has none. All ranks of an engine call this."""
    from vllm.distributed.parallel_state import get_pp_group

    return place_among(_on_all(router_counts(routers)), int(get_pp_group().rank_in_group))


def router_counts(routers: Sequence[Any]) -> list[int]:
    """Return how many routers there are, and the least and the most experts that they take and have."""
    shapes = sorted((router.top_k, router.global_num_experts) for router in routers) or [(0, 0)]
    return [len(routers), *shapes[0], *shapes[-1]]


def place_among(numbers: Sequence[Sequence[int]], stretch: int) -> RoutedLayers | None:
    """Return the place of a stretch's routers, by the `router_counts` of all stretches."""
    kinds = {(one[at], one[at + 1]) for one in numbers if one[0] for at in (1, 3)}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise lasting_error(
            f"the layers of this model take different numbers of experts ({sorted(kinds)}), and their "
            "routes can't be recorded. Set model.follow_routes: false"
        )
    counts = [one[0] for one in numbers]
    return RoutedLayers(sum(counts[:stretch]), sum(counts), *kinds.pop(), len(counts))


def routes_of_all(routes: torch.Tensor) -> torch.Tensor:
    """Return the routes of some tokens through all layers: where a rank has no layer, it gives zeros."""
    from vllm.distributed.parallel_state import get_pp_group

    routes = routes.clone()
    torch.distributed.all_reduce(routes, group=get_pp_group().device_group)
    return routes


def _on_all(mine: list[int]) -> list[list[int]]:
    """Return the numbers of each stretch of layers, in their order."""
    from vllm.distributed.parallel_state import get_pp_group

    group, own = get_pp_group(), torch.tensor(mine)
    if group.world_size == 1:
        return [mine]
    found = [torch.zeros_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, own, group=group.cpu_group)
    return [one.tolist() for one in found]
