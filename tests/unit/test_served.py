"""The engine `served` with a server that lies, hangs, breaks off, or is set up otherwise."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from aiohttp import web
from pydantic import ValidationError

from flows.run.checks import problems_of
from infra.files.sealed_memory import new_memory, seal
from infra.weights.digest import digests_of
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest, engine_of
from producers.engines.on_server import ServedEngine, server_seed
from producers.engines.served_engine import ServedSettings
from producers.engines.server_checks import model_config, wrong_facts
from producers.engines.server_facts import CONTRACT
from producers.engines.staged_patch import StagedPatch
from producers.engines.streamed_answer import StreamedAnswer
from schemas.runspec import RunSpec
from tests.factories import make_patch, make_spec, make_tiny_mixture, make_tiny_model
from tests.fakes.lying_server import LyingServer, data, honest_facts
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[LyingServer]:
    made = LyingServer(honest_facts(model_config(str(model))), tmp_path).open()
    yield made
    made.close()


def spec_of(server: LyingServer, *, start_s: float = 5.0, **generator: Any) -> RunSpec:
    return make_spec(
        generator={"engine": "served", "urls": server.url, "slots": 8, **generator},
        sampling={"max_tokens": 40, "max_prompt_tokens": 8}, deadlines={"start_s": start_s},
    )  # fmt: skip


def open_engine(server: LyingServer, model: Path, **settings: Any) -> ServedEngine:
    made = engine_of(str(model), spec_of(server, **settings))
    assert isinstance(made, ServedEngine)
    return made


@pytest.fixture
def engine(server: LyingServer, model: Path) -> Iterator[ServedEngine]:
    made = open_engine(server, model)
    yield made
    made.close()


def request(number: int, tokens: int = 20, *, endless: bool = True) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", [4, 5], tokens, number, 1.0, endless=endless)


def drawn(engine: ServedEngine, count: int) -> dict[str, DrawnAnswer]:
    """The next answers. It asks without a pause, as a generator does: the pace is measured by that."""
    found: dict[str, DrawnAnswer] = {}
    until = time.monotonic() + 100
    while len(found) < count:
        assert time.monotonic() < until, "waited in vain for answers"
        found.update({one.id: one for one in engine.step(0.02)})
    return found


def test_it_draws_installs_and_says_which_weights_drew(engine: ServedEngine, server: LyingServer) -> None:
    first, second = ({"w": torch.full((4, 3), value), "b": torch.ones(2)} for value in (1.0, 2.0))
    engine.prepare(make_patch(first, "first").read())
    assert engine.install(recompute=False) == {}
    assert engine.digests() == digests_of(first)
    server.how.token_s = 0.01
    for number in range(4):
        engine.submit(request(number, 40))
    wait_until(lambda: min(engine.unfinished().values()) > 2, what="tokens")
    engine.prepare(make_patch(second, "second").read())
    tokens = engine.install(recompute=True)
    assert engine.digests() == digests_of(second)
    assert "/reset_prefix_cache" in server.calls
    found = drawn(engine, 4)
    # each stream ends with what the server says about versions, and it agreed
    assert all(0 < tokens[name] < 40 and made.tokens.size == 40 for name, made in found.items())


def test_a_sample_that_goes_on_is_drawn_with_another_seed() -> None:
    whole, later = request(1), SampleRequest("a", [4], 9, 1, 1.0, made=[7])
    assert server_seed(whole) != server_seed(later) and 0 <= server_seed(whole) < 2**62


def test_dropped_samples_are_dropped_at_the_server(engine: ServedEngine, server: LyingServer) -> None:
    server.how.token_s = 0.05
    for number in range(3):
        engine.submit(request(number, 40))
    wait_until(lambda: min(engine.unfinished().values()) > 1, what="tokens")
    parts = engine.hand_over(["0000000-00", "nobody"])
    engine.abort(["0000001-00"])
    assert len(parts) == 1 and parts[0].tokens.size == parts[0].logprobs.size > 1
    wait_until(lambda: len(server.cancelled) == 2, what="two closed connections")
    assert drawn(engine, 1).keys() == {"0000002-00"}


def test_a_finished_answer_is_not_handed_over(engine: ServedEngine) -> None:
    engine.submit(request(1, 3))
    wait_until(lambda: not engine.unfinished(), what="its end")
    assert engine.hand_over(["0000001-00"]) == []
    assert drawn(engine, 1)["0000001-00"].finish == "length"


def changed(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    """A line in which fields of the choice or of its token are others."""

    def lie(line: dict[str, Any]) -> Any:
        choice = line["choices"][0]
        for name, value in fields.items():
            where = choice if name in choice else choice["logprobs"]["content"][0]
            where[name] = value
        return line

    return lie


LIES = {
    "another request": (lambda line: {**line, "request_id": "generate-tokens-x"}, "another request"),
    "no choice": (lambda line: {**line, "choices": []}, "sends 0 choices"),
    "two choices": (lambda line: {**line, "choices": line["choices"] * 2}, "sends 2 choices"),
    "no token": (changed(token_id=24, token_ids=[24]), "token 24 .* there are 24 tokens"),
    "a negative token": (changed(token_id=-1, token_ids=[-1]), "sends b"),
    "a huge token": (changed(token_ids=[2**70]), "sends b"),
    "other lengths": (changed(token_ids=[1, 2]), "2 tokens with 1 logprobs"),
    "another token's logprob": (changed(token_id=3, token_ids=[2]), "token 2 with the logprob of token 3"),
    "no number": (lambda line: data(line).replace(b'"logprob": -', b'"logprob": NaN, "x": -'), "sends b"),
    "no logprob": (changed(logprob=-9999.0), "sends the logprob -9999.0"),
    "a probability above 1": (changed(logprob=0.5), "sends the logprob 0.5"),
    "null": (changed(logprob=None), "Expected `float`, got `null`"),
    "an end too early": (changed(finish_reason="length"), "ends it with 'length' after 1 of 20"),
    "another end": (changed(finish_reason="abort"), "ends it with 'abort'"),
    "an error": (lambda line: {"error": {"message": "out of memory"}}, "out of memory"),
    "deep JSON": (lambda line: b"data: " + b"[" * 100_000 + b"\n\n", "sends b"),
    "no data": (lambda line: b"hello\n\n", "sends the line b'hello"),
    "an endless line": (lambda line: b"data: " + b"x" * 3_000_000, "sends what can.t be read"),
    "an early end": (lambda line: None, "before its end"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_engine_with_a_reason(name: str, engine: ServedEngine, server: LyingServer) -> None:
    server.how.lie, message = LIES[name]
    engine.submit(request(1))
    with pytest.raises(EngineError, match=message) as error:
        drawn(engine, 1)
    assert server.url in str(error.value) and len(str(error.value)) < 2_000


def test_tokens_without_end_are_refused(engine: ServedEngine, server: LyingServer) -> None:
    server.how.lie = lambda line: data(changed(finish_reason=None)(line)) * 2
    engine.submit(request(1))
    with pytest.raises(EngineError, match="more than 20 tokens"):
        drawn(engine, 1)


def test_what_goes_on_behind_an_end_token_is_refused(engine: ServedEngine, server: LyingServer) -> None:
    server.how.lie = changed(token_id=1, token_ids=[1], finish_reason=None)
    engine.submit(request(1, endless=False))
    with pytest.raises(EngineError, match="goes on behind the end token 1"):
        drawn(engine, 1)


def test_other_versions_than_were_installed_are_refused(engine: ServedEngine, server: LyingServer) -> None:
    engine.prepare(make_patch({"w": torch.ones(3)}, "mine").read())
    engine.install(recompute=False)
    server._version = "another's"
    engine.submit(request(1))
    with pytest.raises(
        EngineError, match=r"weights drew its tokens from \[\(\"another's\", 0\)\] on; they were"
    ):
        drawn(engine, 1)


def test_other_hashes_are_passed_on(engine: ServedEngine, server: LyingServer) -> None:
    state = {"root": "r", "prepared": "r", "digests": {"w": "other"}, "error": ""}
    server.how.answers["weights_state"] = {"results": [{"result": state}]}
    engine.prepare(make_patch({"w": torch.ones(3)}).read())
    engine.install(recompute=False)
    assert engine.digests() == {"w": "other"}  # and the generator compares them


def test_a_server_that_miscounts_is_refused(
    engine: ServedEngine, server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.engines.server_streams._CATCH_UP_S", 0.3)
    engine.prepare(make_patch({"w": torch.ones(3)}).read())
    server.how.token_s = 0.05
    engine.submit(request(1))
    wait_until(lambda: min(engine.unfinished().values()) > 1, what="tokens")
    name = next(iter(server._drawn))
    server.how.answers["drawn_tokens"] = {"results": [{"result": {name: 1}}]}
    with pytest.raises(EngineError, match="says that it has drawn 1 tokens of sample 0000001-00"):
        engine.install(recompute=False)


async def _silent(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def _breaks_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def _huge(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(70):
        await response.write(bytes(1 << 20))
    return response


ANSWERS = {
    "silence": (_silent, "took more than 1 s to answer"),
    "a closed connection": (_breaks_off, "broke off while it answered"),
    "a huge body": (_huge, "sends more than 64 MiB"),
    "no JSON": (lambda request: _plain("<html>"), "with no JSON: <html>"),
    "deep JSON": (lambda request: _plain("[" * 100_000), "with no JSON"),
    "another shape": ({"results": "none"}, "answers server_facts with"),
    "no worker": ({"results": []}, "answers server_facts with"),
    "a worker that fails": ({"results": [{"result": {}}, {"error": "no"}]}, r"says \(worker 1\): no"),
    "another version": ({"results": [{"result": {"contract": 1}}]}, "another version of StreamRL"),
    "a proxy": (lambda request: _plain("Bad Gateway", 502), "no server answers behind .* 502, Bad Gateway"),
    "a redirect": (lambda request: _plain("", 307), "with status 307"),
    "no key": (lambda request: _plain("", 401), "set STREAMRL_SERVER_KEY to its VLLM_API_KEY"),
    "no such path": (lambda request: _plain("", 404), r"--middleware streamrl\.serving\.ServerDoor"),
}  # fmt: skip


async def _plain(text: str, status: int = 200) -> web.StreamResponse:
    return web.Response(text=text, status=status)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_wrong_answer_ends_the_start_with_a_reason(name: str, server: LyingServer, model: Path) -> None:
    server.how.answers["server_facts"], message = ANSWERS[name]
    with pytest.raises(EngineError, match=message) as error:
        open_engine(server, model, start_s=1.0 if name == "silence" else 30.0)
    assert server.url in str(error.value) and len(str(error.value)) < 2_000


def test_a_start_waits_for_a_server_behind_a_proxy(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy takes connections while the server starts, and closes them or answers in its place."""
    monkeypatch.setattr("producers.engines.on_server._LONGEST_AGAIN_S", 0.01)
    proxy: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = [
        lambda request: _plain("Bad Gateway", 502), _breaks_off, lambda request: _plain("", 503),
    ]  # fmt: skip

    async def answer(request: web.Request) -> web.StreamResponse:
        found = proxy.pop()
        if not proxy:
            del server.how.answers["claim_server"]
        return await found(request)

    server.how.answers["claim_server"] = answer
    open_engine(server, model).close()
    assert not proxy


def test_an_engine_that_ends_hardly_waits_for_a_server_that_hangs(server: LyingServer, model: Path) -> None:
    """Else a start that fails, since the server hangs, says so after the generator has given up."""
    engine = open_engine(server, model, start_s=20.0)
    server.how.answers["/streamrl/release"] = _silent
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_an_error_does_not_tell_the_key(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_http(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 nonsense\r\n\r\n")  # type: ignore[attr-defined]
        return web.Response()

    monkeypatch.setenv("STREAMRL_SERVER_KEY", "my-secret")
    server.how.answers["server_facts"] = no_http
    with pytest.raises(EngineError, match="broke off while it answered") as error:
        open_engine(server, model)
    assert "my-secret" not in str(error.value)


def test_a_server_without_our_part_is_named_with_the_flag(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(LyingServer, "_server_facts")
    with pytest.raises(EngineError, match=r"--worker-extension-cls streamrl\.serving\.ServedWorker") as error:
        open_engine(server, model)
    assert error.value.lasting


def test_a_server_without_addresses_for_weights_is_named_with_the_variable(
    server: LyingServer, model: Path
) -> None:
    server.how.answers["/resume"] = lambda request: _plain("", 404)
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1") as error:
        open_engine(server, model)
    assert error.value.lasting


def test_a_server_that_another_generator_takes_over_ends_the_engine(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.engines.on_server.CLAIM_AGAIN_S", 0.05)
    engine = open_engine(server, model)
    try:
        server._owner = "of another one"
        with pytest.raises(EngineError, match="says: it belongs to another"):
            engine.prepare(make_patch({"w": torch.ones(3)}).read())
        with pytest.raises(EngineError, match="says: it belongs to another"):
            wait_until(lambda: engine.step(0.0), what="nothing")
    finally:
        engine.close()
    assert server._owner == "of another one"  # its claim was not let go


def test_it_says_when_samples_can_not_be_asked_for(server: LyingServer, model: Path) -> None:
    server.how.answers["generate"] = lambda request: _plain("off", 403)
    with pytest.raises(EngineError, match="start it with --enable-scale-out") as error:
        open_engine(server, model)
    assert error.value.lasting


def test_nobody_there_is_waited_for(model: Path, tmp_path: Path) -> None:
    gone = LyingServer(honest_facts({}), tmp_path).open()
    gone.close()
    with pytest.raises(EngineError, match="no server answers at"):
        open_engine(gone, model, start_s=1.0)


WRONG = {
    "seeds": ({"ignores_seeds": True}, "it ignores seeds"),
    "temperature": ({"ignores_temperature": True}, "do not follow the temperature: .*processed_logprobs"),
    "others": ({"depends_on_others": True}, "VLLM_BATCH_INVARIANT=1 on a GPU, or set generator.batch_inv"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_trials_find_what_is_wrong(name: str, server: LyingServer, model: Path) -> None:
    fields, message = WRONG[name]
    for field, value in fields.items():
        setattr(server.how, field, value)
    with pytest.raises(EngineError, match=message) as error:
        open_engine(server, model)
    assert error.value.lasting
    if name == "others":
        open_engine(server, model, batch_invariant=False).close()


@pytest.mark.parametrize(
    ("more", "of_all", "message"),
    [(1.0, True, "among the likeliest"), (1e3, False, "likeliest tokens logprobs that are none")],
)
def test_probabilities_above_1_and_other_logprobs_are_found(
    more: float, of_all: bool, message: str, server: LyingServer, model: Path
) -> None:
    def lie(line: dict[str, Any]) -> Any:
        (content,) = line["choices"][0]["logprobs"]["content"]
        for one in content["top_logprobs"]:
            if of_all or one["token_id"] != content["token_id"]:
                one["logprob"] += more
        return line

    server.how.lie = lie
    with pytest.raises(EngineError, match=message):
        open_engine(server, model)


def test_silence_in_the_middle_ends_the_engine(server: LyingServer, model: Path) -> None:
    engine = open_engine(server, model, start_s=1.5)
    try:
        server.how.hangs = asyncio.Event()
        engine.submit(request(1))
        with pytest.raises(EngineError, match="sent no token of 1 samples for"):
            drawn(engine, 1)
        engine.abort(["0000001-00"])
        assert engine.step(0.0) == []
    finally:
        engine.close()


def test_one_silent_sample_ends_the_engine_while_others_go_on(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.engines.streamed_answer._AT_ONCE_S", 0.0)
    engine = open_engine(server, model, start_s=1.5)
    others, until = 0, time.monotonic() + 20
    try:
        server.how.hangs = asyncio.Event()
        engine.submit(request(0))
        wait_until(server.draws, what="a token that hangs")
        server.how.hangs = None
        with pytest.raises(EngineError, match="no token of sample 0000000-00 for"):
            while time.monotonic() < until:
                others += 1
                engine.submit(request(others, 2))
                assert drawn(engine, 1).keys() == {f"{others:07d}-00"}
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("priority", "opened_at", "passed"),
    [(-5, 20.0, True), (-9, 20.0, False), (-5, 10.5, False), (0, 20.0, True)],
)
def test_a_sample_may_wait_while_the_server_draws_what_is_before_it(
    priority: int, opened_at: float, passed: bool
) -> None:
    waits = StreamedAnswer("a", "1", 9, 24, priority=-5, opened_at=10.0)
    waits.may_be_passed_by(StreamedAnswer("b", "2", 9, 24, priority=priority, opened_at=opened_at))
    assert (waits.passed_at is not None) == passed


def test_another_start_of_the_server_is_noticed(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.engines.on_server.CLAIM_AGAIN_S", 0.05)
    engine = open_engine(server, model)
    try:
        server.how.start = "second"
        with pytest.raises(EngineError, match="another owner meanwhile: its weights are gone"):
            wait_until(lambda: engine.step(0.0), what="nothing")
    finally:
        engine.close()


@pytest.mark.parametrize("midway", [False, True])
def test_another_start_of_the_server_is_noticed_also_while_nothing_is_drawn(
    server: LyingServer, model: Path, monkeypatch: pytest.MonkeyPatch, midway: bool
) -> None:
    """As while the trainer steps. A server that was started anew prepares nothing."""
    monkeypatch.setattr("producers.engines.on_server.CLAIM_AGAIN_S", 0.05)
    engine = open_engine(server, model)
    try:
        nothing = {"root": None, "prepared": None, "digests": None, "error": ""}
        server.how.answers["weights_state"] = {"results": [{"result": nothing}]}
        server.how.start = "second"
        if not midway:
            wait_until(lambda: engine._streams._failed, what="the news")
        with pytest.raises(EngineError, match="another owner meanwhile: its weights are gone"):
            engine.prepare(make_patch({"w": torch.ones(3)}).read())
    finally:
        engine.close()


def test_a_server_of_fewer_workers_than_it_says_ends_the_engine(server: LyingServer, model: Path) -> None:
    server.facts = honest_facts(model_config(str(model)), workers=2, ranks=2)
    with pytest.raises(EngineError, match="has 1 workers, and 2 ranks are expected"):
        engine = open_engine(server, model, tensor_parallel=2)
        engine.prepare(make_patch({"a": torch.ones(2)}, "one").read())


def test_a_model_without_windows_is_the_same_one_as_vllm_says_it(tmp_path: Path) -> None:
    spec = make_spec(generator={"engine": "served", "urls": "http://a:1", "slots": 64})
    mixture = str(make_tiny_mixture(tmp_path / "model", "qwen2_moe"))
    config = model_config(mixture)
    assert config["sliding_window"] == 0
    assert wrong_facts(honest_facts(config | {"sliding_window": None}, slots=64), spec, mixture) == []
    (wrong,) = wrong_facts(honest_facts(config | {"sliding_window": 8}, slots=64), spec, mixture)
    assert "sliding_window: 8 there, None here" in wrong


def test_facts_that_do_not_fit_are_named_with_flags(model: Path) -> None:
    spec = make_spec(generator={"engine": "served", "urls": "http://a:1", "slots": 64})
    config = model_config(str(model))
    assert wrong_facts(honest_facts(config, slots=64), spec, str(model)) == []
    for said in (config, {name: one for name, one in config.items() if name != "vocab_size"}):
        liar = honest_facts(said, slots=64, vocabulary=2**31 - 1)
        (wrong_one,) = wrong_facts(liar, spec, str(model))
        assert "another model (vocab_size: 2147483647 there, " in wrong_one
    assert wrong_facts(honest_facts(config, slots=64, vocabulary=0), spec, "") == [
        "its model has 0 tokens to draw"
    ]
    ranks = honest_facts(config, slots=64, workers=2, ranks=2)
    assert wrong_facts(ranks, spec, "") == [
        "it has 2 ranks of tensor parallelism: --tensor-parallel-size 1, or set generator.tensor_parallel: 2"
    ]
    generator = {"engine": "served", "tensor_parallel": 2}
    assert wrong_facts(ranks, make_spec(generator=generator), str(model)) == []
    experts = honest_facts(config, slots=64, workers=2, ranks=2, whole_experts=True)
    (wrong_one,) = wrong_facts(experts, make_spec(generator=generator), "")
    assert wrong_one.startswith("it has expert parallelism, and here slices of each expert are expected")
    wrong = honest_facts(
        config | {"hidden_size": 1}, dtype="bfloat16", longest=8, slots=2, logprobs_mode="raw_logprobs",
        prefix_caching=True, chunked_prefill=True, workers=2, quantization="fp8", adapters=True,
        speculation=True, counts_tokens=False, front_ends=2, offloads=True,
    )  # fmt: skip
    said = "\n".join(wrong_facts(wrong, spec, str(model)))
    flags = (
        "--dtype float32", "--max-model-len 24", "--max-num-seqs 64", "processed_logprobs", "--quantization",
        "--no-enable-prefix-caching", "--no-enable-chunked-prefill", "parallelism", "--enable-lora",
        "--speculative-config", "--api-server-count 1", "VLLM_USE_V2_MODEL_RUNNER=0", "--cpu-offload-gb",
        "hidden_size: 1 there, 64 here",
    )  # fmt: skip
    assert [flag for flag in flags if flag not in said] == []
    assert "install the same version" in wrong_facts(honest_facts({}, contract=1), spec, "")[0]


OFFLOADS = (
    "it offloads weights to main memory, and new ones are written where it computes: start it without "
    "--cpu-offload-gb and --offload-group-size"
)
BY_OTHERS = "vLLM computes this model's experts by FlashInfer CUTLASS, which lays their weights out anew"
LATER_FACTS: list[tuple[dict[str, Any], str]] = [
    ({"cache_dtype": "fp8"},
     "it holds keys and values in fp8, and not in float32 as the model: --kv-cache-dtype auto"),
    ({"cache_dtype": "bfloat16"},
     "it holds keys and values in bfloat16, and not in float32 as the model: --kv-cache-dtype auto"),
    ({"cache_dtype": "float32"}, ""),
    ({"offloads": True}, OFFLOADS),
    ({"unfit_experts": BY_OTHERS}, f"{BY_OTHERS}: --moe-backend triton"),
    ({"unfit_experts": BY_OTHERS, "quantization": "fp8"},
     "it quantizes weights (fp8): start it without --quantization"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "said"), LATER_FACTS)
def test_caches_places_of_weights_and_experts_have_to_fit(facts: dict[str, Any], said: str) -> None:
    spec = make_spec(generator={"engine": "served", "urls": "http://a:1", "slots": 16})
    assert wrong_facts(honest_facts({}, **facts), spec, "") == ([said] if said else [])


def test_a_server_of_an_older_contract_is_refused_by_its_number(server: LyingServer, model: Path) -> None:
    """It says fewer facts, and a newer one says more: both can be read."""
    old = msgspec.to_builtins(honest_facts({}, contract=CONTRACT - 1))
    for name in ("cache_dtype", "offloads", "unfit_experts"):
        del old[name]
    new = msgspec.to_builtins(honest_facts({}, contract=CONTRACT + 1)) | {"a_later_fact": 1}
    for said, number in ((old, CONTRACT - 1), (new, CONTRACT + 1)):
        server.how.answers["server_facts"] = {"results": [{"result": said}]}
        message = f"its StreamRL has contract {number}, this one {CONTRACT}: install the same version"
        with pytest.raises(EngineError, match=message) as refused:
            open_engine(server, model)
        assert refused.value.lasting


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("host:8000", "is no URL of a server"),
        ("ftp://host", "is no URL of a server"),
        ("http://host:99999", "is no URL of a server"),
        ("http://me:secret@host", "a key comes from the environment"),
        ("http://host/?a=b", "has more than a server's address"),
        (["http://a:1", "http://a:1/"], "http://a:1' is there twice"),
        ([], "at least 1 item"),
    ],
)
def test_wrong_addresses_are_refused(urls: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        ServedSettings(engine="served", urls=urls)


def test_each_generator_has_a_server_of_its_own() -> None:
    settings = ServedSettings(engine="served", urls=["http://a:1", "https://b"])
    assert settings.for_generator(1).urls == ["https://b"]
    with pytest.raises(EngineError, match=r"generator\.urls has 2 servers, and none for generator 2"):
        settings.for_generator(2)
    generator = {"engine": "served", "urls": ["http://a:1", "https://b"]}
    few = make_spec(generator=generator, placement={"generators": 2, "balance": {"most": 4}})
    assert any("generator.urls names 2 of the 4 servers" in one for one in problems_of(few))
    enough = problems_of(make_spec(generator=generator, placement={"generators": 2}))
    assert not any("generator.urls" in one for one in enough)


def test_the_pace_is_that_of_tokens(engine: ServedEngine, server: LyingServer) -> None:
    assert engine.pace().batches == [1, 8]  # measured at the start
    server.how.token_s = 0.02
    for number in range(8):
        engine.submit(request(number, 40))
    drawn(engine, 8)
    pace = engine.pace()
    assert 0.01 < pace.seconds[pace.batches.index(max(pace.batches))] < 0.2 and not pace.keeps_bits


def test_a_piece_of_numbers_is_what_the_answer_has(engine: ServedEngine) -> None:
    engine.submit(request(3, 7))
    made = drawn(engine, 1)["0000003-00"]
    assert made.tokens.dtype == np.int32 and made.logprobs.dtype == np.float32
    assert made.tokens.size == made.logprobs.size == 7


def test_a_patch_is_lent_on_one_machine_and_sent_where_that_fails(
    engine: ServedEngine, server: LyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.engines.on_server.this_machine", lambda: "another")
    tensors = {"w": torch.arange(3_000_000, dtype=torch.float32)}

    def give() -> list[str]:
        before = len(server.calls)
        engine.prepare(make_patch(tensors).read())
        engine.install(recompute=False)
        assert engine.digests() == digests_of(tensors)
        return [one for one in dict.fromkeys(server.calls[before:]) if one in wanted]

    wanted = {"/update_weights", "/streamrl/patch"}
    assert give() == ["/update_weights"]
    server.lends = False
    assert give() == ["/update_weights", "/streamrl/patch"]


@pytest.mark.parametrize("file", ["/etc/passwd", "/proc/self/fd/0", "/proc/1/fd/../environ"])
def test_a_worker_reads_no_other_file(file: str) -> None:
    with pytest.raises(EngineError, match=r"is no file in|can't be opened here"):
        StagedPatch(file, 10)


def test_a_worker_reads_a_file_in_memory_that_nobody_can_change() -> None:
    memory = new_memory("test")
    place = f"/proc/{os.getpid()}/fd/{memory}"
    os.write(memory, bytes(11))
    with pytest.raises(EngineError, match="can still be changed"):
        StagedPatch(place, 20)
    seal(memory)
    with pytest.raises(EngineError, match="a patch of 11 bytes is larger than the model allows"):
        StagedPatch(place, 10)
    staged = StagedPatch(place, 11)
    os.close(memory)
    assert staged.path.read_bytes() == bytes(11)
    with pytest.raises(PermissionError):
        os.truncate(staged.path, 3)
    staged.close()
