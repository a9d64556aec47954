"""Records which experts each layer of a mixture took for each token, so that the trainer can take the same.

routers ── in each layer ──► a buffer of the step ── when it draws ──► main memory ──► arrays by request

vLLM's own recorder works with its newer model runner alone, and gives routes only with what has finished. A
token keeps the route by which the token after it was drawn, also if it is computed again later: after a
preemption, or by newer weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from producers.engines.engine import EngineError, lasting_error
from producers.engines.open_requests import Arrival, fetched
from producers.engines.sampler import own_id
from producers.engines.stretch_routes import RoutedLayers, routed_layers, routes_of_all
from schemas.expert_routes import RouteShape


@dataclass
class _Recorded:
    """The routes of one request's tokens."""

    routes: np.ndarray  # [room for tokens, layers, experts taken]
    given: int  # tokens that the request began with
    known: int = 0  # tokens that have a route
    ended: bool = False  # a step that is still under way may have rows of it


@dataclass(frozen=True, slots=True)
class _Step:
    """The routes of one step, which may be on their way to main memory."""

    records: list[_Recorded | None]  # of its requests
    starts: list[int]  # where each request's rows begin, and where the last ones end
    begins: list[int]  # the token that each request's first row is
    settled: list[int] | None  # tokens of each request that are no guesses; None: nobody guesses
    values: torch.Tensor
    arrival: Arrival | None


class RouteRecorder:
    """Records the routes of one engine's open requests."""

    def __init__(
        self, routers: Sequence[Any], layers: RoutedLayers, most_rows: int, device: torch.device
    ) -> None:
        """`routers`: of this rank's layers, in their order; `layers`: their place among those of all ranks.

        `most_rows`: tokens that a step computes at most.
        """
        self._stretched = layers.stretches > 1
        self.shape = RouteShape(layers.all, layers.taken, layers.experts)
        self._buffer = torch.zeros(
            most_rows, self.shape.layers, self.shape.taken, dtype=torch.int32, device=device
        )
        self._narrow = torch.uint8 if self.shape.dtype.itemsize == 1 else torch.uint16
        self._open: dict[str, _Recorded] = {}
        self._late: deque[_Step] = deque()
        self.guesses = False  # whether rows may be of tokens that are not drawn in the end
        for layer, router in enumerate(routers, layers.first):
            router.set_capture_fn(self._capture_of(layer))

    def _capture_of(self, layer: int) -> Any:
        buffer = self._buffer

        def capture(experts: torch.Tensor) -> None:
            buffer[: experts.shape[0], layer] = experts

        return capture

    def open(self, name: str, given: int) -> None:
        """Begin a request; `given`: how many tokens it begins with."""
        room = (given + 64, self.shape.layers, self.shape.taken)
        self._open[name] = _Recorded(np.zeros(room, self.shape.dtype), given)

    def take(self, runner: Any) -> None:
        """Take the routes of the step that vLLM's model runner has just computed."""
        batch = runner.input_batch
        count = len(batch.req_ids)
        starts = runner.query_start_loc.np[: count + 1].tolist()
        routes = self._buffer[: starts[-1]]
        routes = routes_of_all(routes) if self._stretched else routes
        routes = routes.sort(dim=-1).values.to(self._narrow)
        settled = batch.num_tokens_no_spec[:count].tolist() if self.guesses else None
        begins = batch.num_computed_tokens_cpu[:count].tolist()
        # not their names: a request of the same name may be opened again before this step has arrived
        records = [self._open.get(own_id(one)) for one in batch.req_ids]
        self._late.append(_Step(records, starts, begins, settled, *fetched(routes)))
        while self._late and ((there := self._late[0].arrival) is None or there.query()):
            self._keep()

    def close(self, name: str, drawn: int) -> np.ndarray:
        """End a request that so many tokens were drawn for. Return the routes of all but the last token.

        Nothing was drawn behind that one. If none was drawn at all, there are no routes.
        """
        found = self._open[name]
        tokens = found.given + drawn - 1 if drawn else 0
        while found.known < tokens and self._late:
            self._keep()
        found.ended = True
        del self._open[name]
        if found.known < tokens:
            raise EngineError(
                f"the engine has routes of {found.known} tokens of sample {name}, not of {tokens}"
            )
        return found.routes[:tokens].copy()

    def drop(self, name: str) -> None:
        """End a request whose routes nobody wants."""
        if (found := self._open.pop(name, None)) is not None:
            found.ended = True

    def _keep(self) -> None:
        """Keep the routes of the oldest step, and wait for them if need be."""
        step = self._late.popleft()
        if step.arrival is not None:
            step.arrival.synchronize()
        values = step.values.numpy()
        for row, (found, begin) in enumerate(zip(step.records, step.begins, strict=True)):
            if found is None or found.ended:
                continue
            if step.settled is not None:  # what was known of wrong guesses is not
                found.known = min(found.known, step.settled[row] - 1)
            first, last = step.starts[row], step.starts[row + 1]
            skipped = max(0, found.known - begin)
            if first + skipped < last:
                _put(found, begin + skipped, values[first + skipped : last])


def _put(found: _Recorded, at: int, rows: np.ndarray) -> None:
    end = at + len(rows)
    if end > len(found.routes):
        wider = np.zeros((max(end, 2 * len(found.routes)), *found.routes.shape[1:]), found.routes.dtype)
        wider[: found.known] = found.routes[: found.known]
        found.routes = wider
    found.routes[at:end] = rows
    found.known = end


def _routers(model: torch.nn.Module) -> list[Any]:
    """Return the routers of a model's layers, in the layers' order. Raises EngineError if one has no hook."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layers = sorted(
        (one for one in model.modules() if isinstance(one, MoERunner)), key=lambda one: one.layer_id
    )
    for layer in layers:
        if layer.routed_experts.quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
            raise lasting_error(
                f"vLLM routes tokens inside {type(layer.routed_experts.quant_method).__name__}, where routes "
                "can't be recorded. Set model.follow_routes: false"
            )
    return [layer.router for layer in layers]


@contextmanager
def recording_from_the_start(*, wanted: bool) -> Iterator[list[RouteRecorder]]:
    """Have the engine that starts within this record routes, if they are `wanted` and it has any.

    Yields a list that gets its recorder.

    A GPU's graphs are recorded while an engine starts: later they would not call what was added.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    made: list[RouteRecorder] = []
    plain = {runner: runner.load_model for runner in (CPUModelRunner, GPUModelRunner)}

    def loading(load: Any) -> Any:
        def load_model(self: Any, *given: Any, **named: Any) -> None:
            load(self, *given, **named)
            if wanted and not made and (found := routed_layers(routers := _routers(self.model))):
                made.append(RouteRecorder(routers, found, int(self.max_num_tokens), self.device))

        return load_model

    try:
        for runner, load in plain.items():
            runner.load_model = loading(load)
        yield made
    finally:
        for runner, load in plain.items():
            runner.load_model = load
