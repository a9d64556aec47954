"""A sample that moves between generators keeps the routes by which each token was drawn."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from msgspec import structs

from producers.assigned import Assigned
from producers.engines.engine import DrawnAnswer
from producers.engines.engine_process import report_of
from producers.engines.remote import answer_of
from producers.generator_core import Begun, Left, packed_of
from schemas.expert_routes import RouteShape, pack_routes, unpack_routes
from schemas.messages import Part
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec
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


def test_a_part_with_huge_routes_is_of_no_use_before_they_are_unpacked(tmp_path: Path) -> None:
    """Zeros pack well: these would take gigabytes."""
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2})
    )
    context = make_context(make_spec(), tmp_path, role="generator")
    context.record = context.record.model_copy(update={"model": str(tmp_path)})
    assigned = Assigned(context, "now")
    prompt, (part, _) = begun().job.prompt, left()
    part = structs.replace(part, group=prompt.group, index=0)
    tokens = PROMPT + DRAWN - 1
    head = struct.pack("<BHH", 1, 1000, 60_000)
    size = tokens * 1000 * 60_000
    frame = zstandard.ZstdCompressor().compressobj(size=size)
    some = frame.compress(bytes(1 << 20))
    huge = structs.replace(part, routes=head + some)
    assert assigned._part(huge, prompt, 0) is None
    own = structs.replace(part, routes=pack_routes(some_routes(RouteShape(2, 2, 8), tokens)))
    assert assigned._part(own, prompt, 0) is own
    assigned.close()


@pytest.mark.parametrize("experts", [8, 300])
def test_the_engine_process_sends_routes_as_they_are(experts: int) -> None:
    routes = some_routes(replace(SHAPE, experts=experts), 7)
    found = answer_of(report_of(drawn(DRAWN, routes))).routes
    assert found is not None and found.dtype == routes.dtype and np.array_equal(found, routes)
    assert answer_of(report_of(drawn(DRAWN, None))).routes is None
