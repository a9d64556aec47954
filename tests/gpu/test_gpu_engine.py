"""The engine process on a GPU, with batches under way: bits, versions, moves and sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.weights.bits import Model
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.engine import SampleRequest
from producers.engines.remote import RemoteEngine
from tests.bench._gpu_model import sized_model
from tests.gpu.gpu_engines import (
    LONGEST,
    SLOTS,
    changed,
    ended,
    give,
    give_first,
    gpu_engine,
    request,
    rest_of,
    run,
    same,
)
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sized_model(tmp_path_factory.mktemp("model"), "tiny", "cpu")


@pytest.fixture(scope="module")
def versions(model: Path) -> list[Model]:
    """The model's weights; a few of them changed; half of them changed."""
    found: list[Model] = [ModelFolder(model).bits()]
    for number, share in enumerate((0.02, 0.5)):
        found.append(changed(found[-1], share, number))
    return found


@pytest.fixture(scope="module")
def engine(model: Path, versions: Sequence[Model]) -> Iterator[RemoteEngine]:
    options = {"enforce_eager": True}
    with gpu_engine(model, generator={"options": options}, placement={"kind": "colocated"}) as made:
        give_first(made, versions[0])
        yield made


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


def test_a_sample_has_the_same_bits_again_and_in_another_batch_and_alone(engine: RemoteEngine) -> None:
    """Also beyond 128 tokens, with prompts of others in some of its steps."""
    requests = [request(number, 20 + 37 * number % (LONGEST - 20)) for number in range(3 * SLOTS)]
    first = run(engine, requests)
    for others in (requests, requests[::-1], requests[::5], requests[7:8]):
        found = run(engine, others)
        for one in others:
            same(found[one.id], first[one.id])


def test_a_group_computes_its_prompt_once_and_has_the_same_bits(engine: RemoteEngine) -> None:
    whole = [replace(request(number, 200), prompt=range(2, 32)) for number in range(2 * SLOTS)]
    expected = run(engine, whole)
    before = engine.pace().shared
    for one in whole:
        engine.submit(replace(one, endless=False))
    found = ended(engine, len(whole))
    least = 16 * (len(whole) - 1)
    wait_until(
        lambda: engine.step(0.1) == [] and engine.pace().shared - before >= least, what="shared prompts"
    )
    for one in whole:
        assert found[one.id].tokens.size
        same(found[one.id], expected[one.id], found[one.id].tokens.size)


@pytest.mark.parametrize("number", [1, 2])
def test_weights_change_at_the_token_that_the_engine_says(
    engine: RemoteEngine, versions: Sequence[Model], number: int
) -> None:
    """A delta, and a version of whole tensors, while samples run."""
    old, new, requests = versions[number - 1], versions[number], [request(n, LONGEST) for n in range(6)]
    before = run(engine, requests)
    begun = begin(engine, requests)
    tokens = give(engine, PatchFile(old, new, since=str(number - 1), root=str(number)), model_digests(new))
    found = rest_of(engine, begun)
    assert len(tokens) == len(requests) and all(3 < count < LONGEST for count in tokens.values())
    for one in requests:
        drawn, count = found[named(one)], tokens[named(one)]
        same(drawn, before[one.id], count)
        assert drawn.logprobs[count] != before[one.id].logprobs[count]


def test_a_sample_goes_on_after_it_was_handed_over(engine: RemoteEngine) -> None:
    """Its tokens are prefilled, beside the decode steps of others."""
    assert engine.pace().keeps_bits
    requests = [request(n, LONGEST) for n in range(6)]
    expected, begun, resumed = run(engine, requests), begin(engine, requests), []
    for one in requests[:3]:
        (part,) = engine.hand_over([named(one)])
        made = len(part.tokens)
        assert 3 < made == len(part.logprobs) < LONGEST
        same(part, expected[one.id], made)
        engine.submit(replace(one, made=part.tokens.tolist()))
        resumed.append(replace(one, max_tokens=LONGEST - made))
    engine.abort([begun[3].id])
    found = rest_of(engine, [*resumed, *begun[4:]])
    for one in resumed:
        np.testing.assert_array_equal(found[one.id].tokens, expected[one.id].tokens[-one.max_tokens :])
        np.testing.assert_array_equal(found[one.id].logprobs, expected[one.id].logprobs[-one.max_tokens :])
    for one in requests[4:]:
        same(found[named(one)], expected[one.id])


def test_samples_go_on_when_the_engine_has_slept(engine: RemoteEngine) -> None:
    requests = [request(n, LONGEST) for n in range(6)]
    expected = run(engine, requests)
    begun = begin(engine, requests)
    engine.rest()
    engine.go_on()
    found = rest_of(engine, begun)
    for one in requests:
        same(found[named(one)], expected[one.id])


def test_samples_are_computed_anew_by_new_weights(engine: RemoteEngine, versions: Sequence[Model]) -> None:
    """With `recompute` they go on as samples that came from elsewhere with the tokens that they have."""
    requests = [request(n, LONGEST) for n in range(6)]
    give(engine, PatchFile({}, versions[0], since=None, root="first"), model_digests(versions[0]))
    before, begun = run(engine, requests), begin(engine, requests)
    patch = PatchFile(versions[0], versions[1], since="first", root="second")
    tokens = give(engine, patch, model_digests(versions[1]), recompute=True)
    found = rest_of(engine, begun)
    for one in requests:
        drawn, count = found[named(one)], tokens[named(one)]
        assert 3 < count < LONGEST
        same(drawn, before[one.id], count)
        engine.submit(replace(one, made=drawn.tokens[:count].tolist()))
        (alone,) = rest_of(engine, [replace(one, max_tokens=LONGEST - count)]).values()
        np.testing.assert_array_equal(drawn.tokens[count:], alone.tokens)
        np.testing.assert_array_equal(drawn.logprobs[count:], alone.logprobs)


def test_an_engine_that_is_not_batch_invariant_draws_and_takes_weights(
    model: Path, versions: Sequence[Model]
) -> None:
    """It compiles, as in production."""
    with gpu_engine(model, generator={"batch_invariant": False}) as made:
        give_first(made, versions[0])
        requests = [request(number, 40) for number in range(SLOTS)]
        found = run(made, requests)
        assert all(len(found[one.id].tokens) == 40 for one in requests)
        assert all(np.isfinite(found[one.id].logprobs).all() for one in requests)
        give(made, PatchFile(*versions[:2], since="0", root="1"), model_digests(versions[1]))
