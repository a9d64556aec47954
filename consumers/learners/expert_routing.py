"""Has the routers of a mixture of experts take the experts that the generator's engine took (routing replay).

    hidden states ──► the router's own scores ──► topk ──► its own normalisation ──► weights of the experts
                                                   ▲
                                      recorded routes take its place

Engine and trainer round differently, so a router's best experts may differ between them where scores are
close; then the trainer would train another policy than the one that drew the samples. Only the choice is
recorded: the scores are the router's own, so gradients reach it. Tokens without a route are routed freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from consumers.batches.micro_batches import MicroBatch
from infra.errors import Explained
from infra.sending import sent
from schemas.expert_routes import RouteShape, unpack_routes
from schemas.importing import said

NO_EXPERT = -1  # in place of an expert: the router chooses
_PROBES = 5  # tokens on which a router is tried
_known: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by model: its routers


class OfModules(Protocol):
    """A model, or another view of one."""

    def modules(self) -> Iterable[torch.nn.Module]:
        """Return all modules."""


class _Following(TorchFunctionMode):
    """Within it, `topk` takes the experts of routes, in the order of their scores."""

    def __init__(self, routes: torch.Tensor) -> None:
        super().__init__()
        self._routes, self.used = routes, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores, own = args[0], func(*args, **(kwargs or {}))
        self.used += 1
        routes = self._routes.long()
        chosen = torch.where(routes[:, :1] == NO_EXPERT, own[1], routes)
        values = scores.gather(-1, chosen)
        order = values.detach().argsort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values.gather(-1, order), chosen.gather(-1, order)))


def routers(model: OfModules) -> list[Any]:
    """Return the routers of a model's layers, in their order; empty if it is no mixture of experts."""
    return [one for one in model.modules() if _is_router(one)]


def _is_router(module: torch.nn.Module) -> bool:
    taken, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    weight = getattr(module, "weight", None)
    return (
        isinstance(taken, int) and isinstance(experts, int) and isinstance(weight, torch.Tensor)
        and getattr(weight, "ds_shape", weight.shape)[0] == experts
    )  # fmt: skip


def shape_of_routers(model: OfModules) -> RouteShape | None:
    """Return the shape of the routes that a model's routers take; None if it has none, or they differ."""
    found = routers(model)
    shapes = {(one.top_k, one.num_experts) for one in found}
    return RouteShape(len(found), *shapes.pop()) if len(shapes) == 1 else None


def make_followers(model: OfModules) -> None:
    """Have a model's routers take the routes that `follow` sets."""
    for router in routers(model):
        router.routes = None
        router.forward = MethodType(_route, router)  # a copy of the model gets a method of its own


def _route(self: Any, *given: Any, **named: Any) -> Any:
    if self.routes is None:
        return type(self).forward(self, *given, **named)
    with _Following(self.routes) as following:
        found = type(self).forward(self, *given, **named)
    if following.used != 1:
        raise RouterDiffers(
            f"{type(self).__name__} did not choose experts by one call of topk, so it can't follow routes: "
            "set model.follow_routes to false"
        )
    return found


class RouterDiffers(Explained):
    """A router chose experts otherwise than when it was tried."""

    lasting = True


@torch.no_grad()
def wrong_routers(model: OfModules) -> str:
    """Return why a model's routers can't follow routes; empty if they can. Each is tried on some tokens."""
    for router in routers(model):
        if router.weight.is_meta:
            continue  # it was tried in a smaller model
        try:
            wrong = _wrong_router(router)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            wrong = f"{type(router).__name__} can't be tried: {said(error)}"
        if wrong:
            return wrong
    return ""


def _wrong_router(router: Any) -> str:
    weight, name = router.weight, type(router).__name__
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBES, weight.shape[1], generator=draw).to(weight)
    free = type(router).forward(router, hidden)
    scores = free[0] if isinstance(free, tuple) and len(free) == 3 else None
    if scores is None or tuple(scores.shape) != (_PROBES, router.num_experts):
        return f"{name} does not return scores, weights and experts"
    best = scores.topk(router.top_k).indices.sort(dim=-1).values
    worst = scores.topk(router.top_k, largest=False).indices.sort(dim=-1).values
    for routes in (best, worst):
        with _Following(routes) as following:
            _, weights, experts = type(router).forward(router, hidden)
        if following.used != 1 or not torch.equal(experts.sort(dim=-1).values, routes):
            return f"{name} does not choose experts by one call of topk"
        if routes is best and not (torch.equal(experts, free[2]) and torch.equal(weights, free[1])):
            return f"{name} weighs the experts that it would choose otherwise if they are given"
    return ""


def follow(model: OfModules, batch: MicroBatch, device: torch.device) -> None:
    """Have a model's routers take the routes of a micro-batch from now on, or choose by themselves.

    The routes stay until others are set, since a checkpointed layer is computed again later.
    """
    if _known_routers(model):
        set_routes(model, routes_in(batch, device))


def set_routes(model: OfModules, routes: torch.Tensor | None) -> None:
    """Have a model's routers take routes, [tokens, layers, experts], from now on; None: choose themselves."""
    for layer, router in enumerate(_known_routers(model)):
        router.routes = None if routes is None else routes[:, layer]


def _known_routers(model: OfModules) -> list[Any]:
    """Return a model's routers, which are looked for once: a model has many modules."""
    if model not in _known:
        _known[model] = routers(model)
    return _known[model]


def routes_in(batch: MicroBatch, device: torch.device) -> torch.Tensor | None:
    """Return the routes of a micro-batch's tokens and filling; None if none are recorded."""
    if not any(batch.routes):
        return None
    found: np.ndarray | None = None
    start = 0
    for packed, size in zip(batch.routes, batch.packing.sizes, strict=True):
        if packed:
            some = unpack_routes(packed, size - 1)  # an answer's last token has none
            if found is None:
                found = np.full((batch.tokens.shape[0], *some.shape[1:]), NO_EXPERT, np.int16)
            found[start : start + size - 1] = some
        start += size
    assert found is not None
    return sent(torch.from_numpy(found), device)
