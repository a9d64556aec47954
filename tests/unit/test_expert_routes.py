"""Routes in messages: packed small, unpacked exactly, and refused if they can't be a sample's."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flows.run.checks import _route_problems
from infra.route_shapes import followed_shape, route_shape, shape_in
from schemas.expert_routes import (
    BadRoutes,
    RouteShape,
    pack_routes,
    routed_tokens,
    unpack_routes,
    wrong_routes,
)
from schemas.fitness import fault
from schemas.messages import Part, Sample
from schemas.wire import Contradictory, decode, encode
from tests.factories import make_sample, make_spec

SHAPE = RouteShape(layers=3, taken=2, experts=8)


@st.composite
def shapes(draw: st.DrawFn) -> RouteShape:
    experts = draw(st.sampled_from([1, 2, 4, 8, 60, 128, 256, 257, 512]))
    return RouteShape(draw(st.integers(1, 5)), draw(st.integers(1, min(experts, 10))), experts)


def some_routes(shape: RouteShape, tokens: int, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).random((tokens, shape.layers, shape.experts)).argsort(axis=-1)
    return np.sort(order[..., : shape.taken], axis=-1).astype(shape.dtype)


@given(shapes(), st.integers(0, 40), st.integers(0, 9))
@example(RouteShape(layers=2, taken=6, experts=8), 14, 0)  # few numbers, and tables of codes beside them
@settings(deadline=None)
def test_routes_come_back_as_they_were(shape: RouteShape, tokens: int, seed: int) -> None:
    routes = some_routes(shape, tokens, seed)
    packed = pack_routes(routes)
    assert routed_tokens(packed) == tokens
    found = unpack_routes(packed, tokens)
    assert found.dtype == routes.dtype and np.array_equal(found, routes)
    assert wrong_routes(packed, tokens, shape) == ""
    assert len(packed) <= shape.most_bytes(tokens)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5, 3.0])
def test_no_routes_take_more_room_than_the_check_counts_with(skew: float) -> None:
    shape = RouteShape(layers=48, taken=8, experts=128)
    draw = np.random.default_rng(1)
    far = np.minimum(draw.geometric(skew / 16, (500, 48, 8)).cumsum(axis=-1), 120 + np.arange(8))
    packed = pack_routes(np.sort(far, axis=-1).astype(np.uint8))
    assert wrong_routes(packed, 500, shape) == ""
    assert len(packed) <= shape.most_bytes(500) < 500 * 48 * 8


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_with_a_reason(raw: bytes) -> None:
    for packed in (raw, pack_routes(some_routes(SHAPE, 4))[:9] + raw, struct.pack("<BHH", 1, 3, 2) + raw):
        try:
            found = unpack_routes(packed, 4)
        except BadRoutes as error:
            assert str(error)
            assert wrong_routes(packed, 4, SHAPE)
        else:
            assert found.shape[0] == 4


def raw_routes(differences: np.ndarray) -> bytes:
    """Routes with these differences, whatever they are."""
    head = struct.pack("<BHH", differences.itemsize, *differences.shape[1:])
    return head + zstandard.ZstdCompressor().compress(differences.tobytes())


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ([[[1, 0]] * 3] * 4, "names? an expert twice"),
        ([[[1, 255]] * 3] * 4, "too large"),
        ([[[1, 7]] * 3] * 4, "expert 8; the model has 8"),
        ([[[1, 2]] * 2] * 4, "of 2 layers with 2 experts a token; this model has 3 with 2"),
        ([[[1, 2, 3]] * 3] * 4, "of 3 layers with 3 experts a token"),
        ([[[1, 2]] * 3] * 5, "of 5 tokens; 4 are expected"),
    ],
)
def test_a_liar_is_named(differences: object, reason: str) -> None:
    found = wrong_routes(raw_routes(np.array(differences, np.uint8)), 4, SHAPE)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)


def test_what_says_to_become_huge_is_not_unpacked() -> None:
    bomb = struct.pack("<BHH", 1, 3, 2) + zstandard.ZstdCompressor().compress(bytes(6 << 24))
    assert len(bomb) < 1 << 16
    assert "16777216 tokens; 4 are expected" in wrong_routes(bomb, 4, SHAPE)
    unsaid = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(24))
    assert "no whole number of tokens" in wrong_routes(struct.pack("<BHH", 1, 3, 2) + unsaid, 4, SHAPE)


def test_a_sample_has_the_routes_that_its_trainer_follows() -> None:
    spec = make_spec()
    plain = make_sample(spec, 0, 0)
    tokens = plain.prompt_tokens.size + plain.tokens.size - 1
    routed = replace(plain, routes=pack_routes(some_routes(SHAPE, tokens)))
    assert fault(plain, spec) == fault(routed, spec, routes=SHAPE) == ""
    assert "it has no routes" in fault(plain, spec, routes=SHAPE)
    assert "follows none" in fault(routed, spec)
    assert decode(encode(routed), Sample) == routed


def test_routes_of_another_length_never_pass_the_gate() -> None:
    sample = make_sample(make_spec(), 0, 0)
    for tokens in (0, sample.tokens.size):
        with pytest.raises(Contradictory, match="routes are of"):
            decode(encode(replace(sample, routes=pack_routes(some_routes(SHAPE, tokens)))), Sample)
    with pytest.raises(Contradictory, match="can't be read"):
        decode(encode(replace(sample, routes=b"?")), Sample)
    part = Part(
        run="r", group=0, index=0, tokens=sample.tokens, logprobs=sample.logprobs, roots=["r"],
        version_starts=np.zeros(1, np.int32), versions=np.zeros(1, np.int32), seed=1, generator="g",
        started_at=0.0, sent_at=0.0, routes=b"\1\0",
    )  # fmt: skip
    with pytest.raises(Contradictory, match="can't be read"):
        decode(encode(part), Part)


MIXTURE = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}


def test_a_config_tells_the_shape_of_routes(tmp_path: Path) -> None:
    assert shape_in(MIXTURE) == RouteShape(48, 8, 128)
    assert shape_in({**MIXTURE, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2}) == RouteShape(
        23, 8, 128
    )
    mixtral = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert shape_in(mixtral) == RouteShape(32, 2, 8)
    assert shape_in({"num_hidden_layers": 32}) is None
    assert shape_in({**MIXTURE, "num_experts_per_tok": "many"}) is None
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    assert followed_shape(str(tmp_path), make_spec()) == RouteShape(48, 8, 128)
    assert followed_shape(str(tmp_path), make_spec(model={"follow_routes": False})) is None
    (tmp_path / "config.json").write_text("{")
    assert route_shape(str(tmp_path)) is None


def test_samples_that_a_record_does_not_hold_are_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    sampling = {"max_tokens": 40_000, "max_prompt_tokens": 1_000}
    spec = make_spec(sampling=sampling, trainer={"microbatch_tokens": 50_000})
    (problem,) = _route_problems(spec, tmp_path)
    assert problem.startswith("sampling: a sample may have max_prompt_tokens + max_tokens = 41000 tokens")
    assert "model.follow_routes: false" in problem
    most = int(problem.partition("Lower them to ")[2].split()[0])
    assert 29_000 < most < 31_000
    fits = make_spec(sampling={**sampling, "max_tokens": most - 1_000}, trainer={"microbatch_tokens": 50_000})
    assert _route_problems(fits, tmp_path) == []
    free = make_spec(sampling=sampling, trainer={"microbatch_tokens": 50_000}, model={"follow_routes": False})
    assert _route_problems(free, tmp_path) == []


def test_an_engine_that_records_no_routes_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    served = make_spec(generator={"engine": "served"})
    (problem,) = _route_problems(served, tmp_path)
    assert problem.startswith("model.follow_routes: the model in") and "generator.engine served" in problem
    free = make_spec(generator={"engine": "served"}, model={"follow_routes": False})
    assert _route_problems(free, tmp_path) == []
