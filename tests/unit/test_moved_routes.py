"""A sample that moves between generators keeps the routes by which each token was drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from producers.engines.engine import DrawnAnswer
from producers.engines.engine_process import report_of
from producers.engines.remote import answer_of
from producers.generator_core import Begun, Left, packed_of
from schemas.expert_routes import pack_routes, unpack_routes
from schemas.messages import Part
from schemas.wire import decode, encode
from tests.unit.test_decoding import job
from tests.unit.test_expert_routes import SHAPE, some_routes

DRAWN = 5


def begun(part: Part | None = None) -> Begun:
    return Begun(job(1), 9, 0.0, [0], [3], ["r"]) if part is None else Begun.of(part, job(1))


PROMPT = begun().job.prompt.tokens.size


def drawn(tokens: int, of: np.ndarray | None) -> DrawnAnswer:
    return DrawnAnswer("x", np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), "stop", of)


def left(tokens: int = DRAWN) -> tuple[Part, np.ndarray]:
    """What one generator hands to the next, and its routes."""
    routes = some_routes(SHAPE, PROMPT + tokens - 1 if tokens else 0, seed=1)
    part = Left.of(begun(), drawn(tokens, routes)).part("r", "g", 0.0)
    return decode(encode(part), Part), routes


def test_the_first_route_of_each_token_counts() -> None:
    part, first = left()
    second = some_routes(SHAPE, PROMPT + DRAWN + 3 - 1, seed=2)
    whole = begun(part).whole(drawn(3, second))
    assert whole.tokens.size == DRAWN + 3 and whole.routes is not None
    assert np.array_equal(whole.routes[: len(first)], first)
    assert np.array_equal(whole.routes[len(first) :], second[len(first) :])
    again = Left.of(begun(part), drawn(0, some_routes(SHAPE, 0)))  # moved on before a token was drawn
    assert np.array_equal(unpack_routes(again.routes, len(first)), first)


def test_a_sample_that_moves_before_its_first_token_has_no_routes_yet() -> None:
    part, _ = left(0)
    assert part.routes == b""
    second = some_routes(SHAPE, PROMPT + 2)
    assert begun(part).whole(drawn(3, second)).routes is second


@pytest.mark.parametrize("tokens", [DRAWN - 1, DRAWN])
def test_what_a_liar_hands_over_gives_no_routes(tokens: int) -> None:
    """The trainer's gate then refuses the sample, and it is made anew."""
    part, _ = left()
    wrong = some_routes(replace(SHAPE, taken=1 + tokens - (DRAWN - 1)), PROMPT + tokens - 1)
    if tokens == DRAWN:
        wrong = wrong[:, :2]  # another number of layers
    lying = begun(part)
    lying.routes = pack_routes(wrong)
    assert packed_of(lying.whole(drawn(3, some_routes(SHAPE, PROMPT + DRAWN + 2)))) == b""


@pytest.mark.parametrize("experts", [8, 300])
def test_the_engine_process_sends_routes_as_they_are(experts: int) -> None:
    routes = some_routes(replace(SHAPE, experts=experts), 7)
    found = answer_of(report_of(drawn(DRAWN, routes))).routes
    assert found is not None and found.dtype == routes.dtype and np.array_equal(found, routes)
    assert answer_of(report_of(drawn(DRAWN, None))).routes is None
