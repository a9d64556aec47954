"""The engine process on a GPU, with batches under way: bits, versions, moves and sleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.weights.bits import Bits, Model
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from tests.bench._gpu_model import sized_model
from tests.factories import make_spec
from tests.waiting import wait_until

SLOTS, LONG = 16, 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sized_model(tmp_path_factory.mktemp("model"), "tiny", "cpu")


@pytest.fixture(scope="module")
def versions(model: Path) -> list[Model]:
    """The model's weights; a few of them changed; half of them changed."""
    found: list[Model] = [ModelFolder(model).bits()]
    for number, share in enumerate((0.02, 0.5)):
        draw = np.random.default_rng(number)
        found.append({
            name: Bits(one.dtype, one.shape,
                       one.data ^ (0x40 * (draw.random(one.data.size) < share)).astype(one.data.dtype))
            for name, one in found[-1].items()
        })  # fmt: skip
    return found


@pytest.fixture(scope="module")
def engine(model: Path, versions: Sequence[Model]) -> Iterator[RemoteEngine]:
    spec = make_spec(
        generator={"slots": SLOTS, "gpu_memory": 0.2, "kv_cache_mib": 64, "options": {"enforce_eager": True}},
        model={"dtype": "bfloat16"},
        placement={"kind": "colocated"}, sampling={"max_tokens": LONG, "max_prompt_tokens": 32},
        trainer={"microbatch_tokens": 4096},
    )  # fmt: skip
    options = EngineOptions(model=str(model), spec=spec.model_dump_json())
    made = RemoteEngine(options, threading.Event(), deadline_s=300).open()
    made.wait_until_ready()
    give(made, PatchFile({}, versions[0], since=None, root="0"), versions[0])
    yield made
    made.close()


def give(engine: RemoteEngine, patch: PatchFile, whole: Model) -> Mapping[str, int]:
    """Install weights, and return how many tokens running samples had by then."""
    engine.prepare(patch)
    wait_until(engine.is_ready, what="its being ready")
    installed = engine.install(recompute=False)
    wait_until(lambda: engine.digests() is not None, what="what it holds")
    assert engine.digests() == model_digests(whole)
    return installed.tokens


def request(number: int, tokens: int) -> SampleRequest:
    prompt = [2 + number % 400, *range(5, 6 + number % 20)]
    return SampleRequest(f"{number:07d}-00", prompt, tokens, 1000 + number, 1.0, endless=True)


def run(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    for one in requests:
        engine.submit(one)
    return rest_of(engine, requests)


def rest_of(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    found: dict[str, DrawnAnswer] = {}

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == len(requests)

    wait_until(all_there, what=f"{len(requests)} samples")
    for one in requests:
        assert len(found[one.id].tokens) == len(found[one.id].logprobs) == one.max_tokens
    return found


def begin(engine: RemoteEngine, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
    """Let samples run until all have some tokens. They have other names: the last numbers are not theirs."""
    requests = [replace(one, id=named(one)) for one in requests]
    for one in requests:
        engine.submit(one)

    def under_way() -> bool:
        assert engine.step(0.05) == [], "it ended already: this test shows nothing"
        tokens = engine.unfinished()
        return all(tokens.get(one.id, 0) > 3 for one in requests)

    wait_until(under_way, what="some tokens")
    return requests


def named(one: SampleRequest) -> str:
    return f"9{one.id[1:]}"


def same(found: DrawnAnswer, expected: DrawnAnswer, tokens: int | None = None) -> None:
    np.testing.assert_array_equal(found.tokens[:tokens], expected.tokens[:tokens])
    np.testing.assert_array_equal(found.logprobs[:tokens], expected.logprobs[:tokens])


def test_a_sample_has_the_same_bits_again_and_in_another_batch_and_alone(engine: RemoteEngine) -> None:
    """Also beyond 128 tokens, with prompts of others in some of its steps."""
    requests = [request(number, 20 + 37 * number % (LONG - 20)) for number in range(3 * SLOTS)]
    first = run(engine, requests)
    for others in (requests, requests[::-1], requests[::5], requests[7:8]):
        found = run(engine, others)
        for one in others:
            same(found[one.id], first[one.id])


@pytest.mark.parametrize("number", [1, 2])
def test_weights_change_at_the_token_that_the_engine_says(
    engine: RemoteEngine, versions: Sequence[Model], number: int
) -> None:
    """A delta, and a version of whole tensors, while samples run."""
    old, new, requests = versions[number - 1], versions[number], [request(n, LONG) for n in range(6)]
    before = run(engine, requests)
    begun = begin(engine, requests)
    tokens = give(engine, PatchFile(old, new, since=str(number - 1), root=str(number)), new)
    found = rest_of(engine, begun)
    assert len(tokens) == len(requests) and all(3 < count < LONG for count in tokens.values())
    for one in requests:
        drawn, count = found[named(one)], tokens[named(one)]
        same(drawn, before[one.id], count)
        assert drawn.logprobs[count] != before[one.id].logprobs[count]


def test_a_sample_goes_on_after_it_was_handed_over(engine: RemoteEngine) -> None:
    """Its tokens are prefilled, beside the decode steps of others."""
    assert engine.pace().keeps_bits
    requests = [request(n, LONG) for n in range(6)]
    expected, begun, resumed = run(engine, requests), begin(engine, requests), []
    for one in requests[:3]:
        (part,) = engine.hand_over([named(one)])
        made = len(part.tokens)
        assert 3 < made == len(part.logprobs) < LONG
        same(part, expected[one.id], made)
        engine.submit(replace(one, made=part.tokens.tolist()))
        resumed.append(replace(one, max_tokens=LONG - made))
    engine.abort([begun[3].id])
    found = rest_of(engine, [*resumed, *begun[4:]])
    for one in resumed:
        np.testing.assert_array_equal(found[one.id].tokens, expected[one.id].tokens[-one.max_tokens :])
        np.testing.assert_array_equal(found[one.id].logprobs, expected[one.id].logprobs[-one.max_tokens :])
    for one in requests[4:]:
        same(found[named(one)], expected[one.id])


def test_samples_go_on_when_the_engine_has_slept(engine: RemoteEngine) -> None:
    requests = [request(n, LONG) for n in range(6)]
    expected = run(engine, requests)
    begun = begin(engine, requests)
    engine.rest()
    engine.go_on()
    found = rest_of(engine, begun)
    for one in requests:
        same(found[named(one)], expected[one.id])
