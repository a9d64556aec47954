"""Routes are recorded by request and token, whatever vLLM does with its batches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from producers.engines.engine import EngineError
from producers.engines.route_recorder import RouteRecorder
from producers.engines.stretch_routes import RoutedLayers, place_among, router_counts
from schemas.expert_routes import RouteShape

EXPERTS = 8


class Router:
    """A router of vLLM, as far as it is asked."""

    def __init__(self, taken: int = 2, experts: int = EXPERTS) -> None:
        self.top_k, self.global_num_experts = taken, experts

    def set_capture_fn(self, capture: Callable[[torch.Tensor], None]) -> None:
        self.capture = capture


def routed(routers: list[Router]) -> RoutedLayers:
    """The place of routers that one rank has all of."""
    found = place_among([router_counts(routers)], 0)
    assert found is not None
    return found


class Runner:
    """vLLM's model runner: each step computes some tokens of some requests."""

    def __init__(self, layers: int = 3, experts: int = EXPERTS) -> None:
        self.routers = [Router(experts=experts) for _ in range(layers)]
        self.recorder = RouteRecorder(self.routers, routed(self.routers), 64, torch.device("cpu"))

    def step(self, *given: tuple[str, int, int], settled: tuple[int, ...] = (), salt: int = 0) -> None:
        """`given`: name, first token and number of tokens of each request."""
        rows = [(name, at) for name, begin, count in given for at in range(begin, begin + count)]
        for layer, router in enumerate(self.routers):
            chosen = [route(name, at, salt)[layer][::-1] for name, at in rows]
            router.capture(torch.tensor(np.array(chosen)))
        starts = np.cumsum([0, *(count for *_, count in given)])
        self.query_start_loc = SimpleNamespace(np=np.concatenate([starts, [99, 99]]))
        self.input_batch = SimpleNamespace(
            req_ids=[f"{name}-12345678" for name, *_ in given],
            num_computed_tokens_cpu=np.array([begin for _, begin, _ in given]),
            num_tokens_no_spec=np.array(settled or [0] * len(given)),
        )
        self.recorder.take(self)


def route(name: str, at: int, salt: int = 0) -> np.ndarray:
    """The experts that each of three layers takes for a token."""
    draw = np.random.default_rng([*name.encode(), at, salt])
    return np.sort(np.stack([draw.permutation(EXPERTS)[:2] for _ in range(3)]), axis=-1)


def routes(name: str, tokens: int, salt: int = 0) -> np.ndarray:
    return np.array([route(name, at, salt) for at in range(tokens)], np.uint8).reshape(tokens, 3, 2)


def test_each_request_gets_the_routes_of_its_own_tokens() -> None:
    runner = Runner()
    assert runner.recorder.shape == RouteShape(3, 2, EXPERTS)
    runner.recorder.open("a", 4)
    runner.recorder.open("b", 70)  # computed in pieces
    runner.step(("b", 0, 30), ("a", 0, 4), ("nobody", 0, 3))
    runner.step(("a", 4, 1), ("b", 30, 40))
    runner.step(("b", 70, 1))
    assert np.array_equal(runner.recorder.close("a", 2), routes("a", 5))
    assert np.array_equal(runner.recorder.close("b", 2), routes("b", 71))
    with pytest.raises(KeyError):
        runner.recorder.close("a", 2)


def test_a_token_that_is_computed_again_keeps_its_route() -> None:
    runner = Runner()
    runner.recorder.open("a", 3)
    runner.step(("a", 0, 3))
    runner.step(("a", 3, 1))
    runner.step(("a", 0, 2), salt=1)  # preempted, and then by newer weights
    runner.step(("a", 2, 3), salt=1)
    found = runner.recorder.close("a", 3)
    assert np.array_equal(found[:4], routes("a", 4))
    assert np.array_equal(found[4], route("a", 4, 1))


def test_routes_of_wrong_guesses_are_replaced() -> None:
    runner = Runner()
    runner.recorder.guesses = True
    runner.recorder.open("a", 3)
    runner.step(("a", 0, 3), settled=(3,))
    runner.step(("a", 3, 4), settled=(4,), salt=1)  # three guesses, of which one is right
    runner.step(("a", 5, 1), settled=(6,), salt=2)
    found = runner.recorder.close("a", 4)
    assert np.array_equal(found[:3], routes("a", 3))
    assert np.array_equal(found[3:5], routes("a", 5, 1)[3:])
    assert np.array_equal(found[5], route("a", 5, 2))


def test_what_was_not_recorded_is_never_made_up() -> None:
    runner = Runner()
    runner.recorder.open("a", 3)
    runner.step(("a", 0, 3))
    with pytest.raises(EngineError, match="routes of 3 tokens of sample a, not of 4"):
        runner.recorder.close("a", 2)
    runner.recorder.open("a", 3)
    assert len(runner.recorder.close("a", 0)) == 0, "nothing was drawn"
    runner.recorder.drop("a")


class Late:
    """A copy that has not come until somebody waits for it."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


def test_routes_on_their_way_are_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    monkeypatch.setattr("producers.engines.route_recorder.fetched", lambda values: (values.clone(), Late()))
    runner.recorder.open("a", 3)
    runner.step(("a", 0, 3))
    runner.step(("a", 3, 1))
    runner.step(("a", 4, 1))  # behind the end, which nobody knew of
    assert np.array_equal(runner.recorder.close("a", 2), routes("a", 4))
    assert len(runner.recorder._late) == 1, "the last step is not waited for"


def test_more_experts_take_wider_numbers_and_uneven_layers_are_refused() -> None:
    assert Runner(experts=300).recorder.shape.dtype == np.uint16
    with pytest.raises(EngineError, match="follow_routes: false"):
        routed([Router(), Router(taken=3)])


def test_ranks_know_where_their_layers_are_among_all() -> None:
    numbers = [router_counts([Router()] * count) for count in (2, 0, 3)]  # the second has no experts
    assert [place_among(numbers, stretch) for stretch in range(3)] == [
        RoutedLayers(first, 5, 2, EXPERTS, 3) for first in (0, 2, 2)
    ]
    assert place_among([router_counts([])] * 2, 1) is None
    with pytest.raises(EngineError, match=r"\[\(2, 8\), \(3, 8\)\].*follow_routes: false"):
        place_among([router_counts([Router()]), router_counts([Router(taken=3)])], 0)


def test_a_rank_records_at_the_places_of_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' columns come from their ranks: here they are zeros, and what comes is what is kept."""
    runner, seen = Runner(), list[torch.Tensor]()
    numbers = [router_counts([Router()] * 2), router_counts(runner.routers)]
    place = place_among(numbers, 1)
    assert place is not None

    def together(mine: torch.Tensor) -> torch.Tensor:
        seen.append(mine.clone())
        return mine

    monkeypatch.setattr("producers.engines.route_recorder.routes_of_all", together)
    runner.recorder = RouteRecorder(runner.routers, place, 64, torch.device("cpu"))
    runner.recorder.open("a", 3)
    runner.step(("a", 0, 3))
    found = runner.recorder.close("a", 1)
    assert found.shape == (3, 5, 2) and np.array_equal(found[:, 2:], routes("a", 3))
    (mine,) = seen
    assert not mine[:, :2].any() and mine.shape == (3, 5, 2)
