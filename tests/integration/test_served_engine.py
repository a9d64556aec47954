"""A real server of vLLM as a generator's engine: weights, seeds, logprobs, its end and its next start."""

from __future__ import annotations

import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from flows.run.inspection.servers import look_at_servers
from infra.weights.bits import model_of
from infra.weights.digest import digests_of
from infra.weights.patch import PatchFile
from infra.weights.slices import SliceDigests, Slicing
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest, engine_of
from producers.engines.engine_messages import EngineOptions
from producers.engines.on_server import ServedEngine
from producers.engines.remote import RemoteEngine
from producers.engines.server_checks import wrong_facts
from producers.engines.server_link import KEY_VARIABLE, ServerLink
from producers.stopping import stopping_of
from schemas.rank_layout import RankLayout
from schemas.runspec import RunSpec
from tests.factories import make_patch, make_sample, make_spec, make_tiny_model
from tests.harness import running
from tests.servers import KEY, VllmServer
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With so many layers a step takes some milliseconds: there is time to do things while samples are drawn.
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=16, width=128)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        made = VllmServer(model, tmp_path_factory.mktemp("server"))
        yield made.start()
        made.stop()


def spec_of(server: VllmServer, **sections: object) -> RunSpec:
    generator = {"engine": "served", "urls": server.url, "slots": 8}
    sampling = {"max_tokens": 200, "max_prompt_tokens": 56}
    more: dict[str, object] = {"sampling": sampling, "trainer": {"microbatch_tokens": 256}}
    return make_spec(**more | {"generator": generator} | sections)


@pytest.fixture
def engine(server: VllmServer, model: Path) -> Iterator[ServedEngine]:
    made = engine_of(str(model), spec_of(server))
    assert isinstance(made, ServedEngine)
    give(made, weights(model, 0), "zero")
    yield made
    made.close()


def weights(model: Path, change: int) -> dict[str, torch.Tensor]:
    """The model's weights, moved a little for each change."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)
    return {
        name: tensor.detach() + 0.02 * bool(change) * torch.randn(tensor.shape, generator=noise)
        for name, tensor in net.named_parameters()
    }


def give(
    engine: ServedEngine, tensors: Mapping[str, torch.Tensor], root: str, *, recompute: bool = False
) -> dict[str, int]:
    """Let it hold other weights."""
    engine.prepare(make_patch(tensors, root).read())
    tokens = engine.install(recompute=recompute)
    assert engine.digests() == digests_of(tensors)
    return tokens


def request(number: int, tokens: int = 40, *, endless: bool = False) -> SampleRequest:
    prompt = [4 + number % 9, 5, 6]
    return SampleRequest(f"{number:07d}-00", prompt, tokens, 1000 + number, float(tokens), endless=endless)


def run(engine: ServedEngine, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
    for one in requests:
        engine.submit(one)
    return rest(engine, len(requests))


def rest(engine: ServedEngine, count: int) -> dict[str, DrawnAnswer]:
    """The answers that finish next."""
    found: dict[str, DrawnAnswer] = {}

    def enough() -> bool:
        found.update({one.id: one for one in engine.step(0.02)})
        return len(found) >= count

    wait_until(enough, what=f"{count} answers", deadline_s=60)
    return found


def begin(engine: ServedEngine, requests: Sequence[SampleRequest]) -> None:
    """Have the server draw them from the same moment on: so none ends while others are sent."""
    engine.sleep()
    for one in requests:
        engine.submit(one)
    engine.step(0.1)
    assert engine.unfinished() == {one.id: 0 for one in requests}
    engine.wake()


def wait_for_tokens(engine: ServedEngine, count: int, *, of: Sequence[str] = ()) -> dict[str, DrawnAnswer]:
    """Wait until each has so many tokens. Return those that are finished already: the machine may be slow."""
    early: dict[str, DrawnAnswer] = {}

    def enough() -> bool:
        early.update({one.id: one for one in engine.step(0.0)})
        tokens = engine.unfinished()
        return all(tokens.get(name, 0) >= count or name in early for name in of or [*tokens, *early])

    wait_until(enough, what=f"{count} tokens of each")
    return early


def logprobs_of(model: Path, tensors: dict[str, torch.Tensor], made: DrawnAnswer) -> np.ndarray:
    """What a plain model gives to an answer to its request."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.load_state_dict(tensors, strict=False)
    net.tie_weights()
    prompt = request(int(made.id[:7])).prompt
    whole = torch.tensor([[*prompt, *made.tokens.tolist()]])
    with torch.no_grad():
        logprobs = net(input_ids=whole).logits[0].log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.thorough
def test_a_server_of_two_ranks_has_slices_of_the_weights(
    engine: ServedEngine, server: VllmServer, model: Path, tmp_path: Path
) -> None:
    """They draw as one rank does, and each slice is verified, also after a delta."""
    old, new = weights(model, 0), weights(model, 1)
    slices = SliceDigests(Slicing.for_engine(model, RankLayout(2)))
    requests = [request(number) for number in range(8)]
    give(engine, new, "one")
    expected = run(engine, requests)
    two = VllmServer(model, tmp_path)
    two.start(tensor_parallel_size="2")
    try:
        with pytest.raises(EngineError, match="--tensor-parallel-size 1, or set generator"):
            engine_of(str(model), spec_of(two))
        generator = {"engine": "served", "urls": two.url, "slots": 8, "tensor_parallel": 2}
        made = engine_of(str(model), spec_of(two, generator=generator))
        assert isinstance(made, ServedEngine)
        for before, held, since, root in (({}, old, None, "zero"), (model_of(old), new, "zero", "one")):
            if since:  # as from another machine: both ranks map what came over HTTP
                made._facts = msgspec.structs.replace(made._facts, machine="another")
            made.prepare(PatchFile(before, model_of(held), since=since, root=root).read())
            made.install(recompute=False)
            assert made.digests() == slices.of(model_of(held), digests_of(held))
        found = run(made, requests)
        made.close()
    finally:
        shared, sockets = two.shared_memory(), two.sockets()
        named = [path for path in sockets if path.exists()]
        two.stop()
    assert sockets and not named, "a server that is killed would leave them behind"
    assert any("cpushm" in file.name for file in shared) and not any(file.exists() for file in shared)
    for name, one in expected.items():
        np.testing.assert_array_equal(one.tokens, found[name].tokens)
        np.testing.assert_allclose(one.logprobs, found[name].logprobs, atol=1e-4)


@pytest.mark.thorough
def test_answers_depend_on_their_seeds_alone_and_have_the_learners_logprobs(
    engine: ServedEngine, model: Path, server: VllmServer
) -> None:
    requests = [request(number) for number in range(12)]  # more than there are slots
    together, reversed_ = run(engine, requests), run(engine, requests[::-1])
    alone = {name: made for one in requests[:4] for name, made in run(engine, [one]).items()}
    for name, made in together.items():
        for other in [reversed_[name], *([alone[name]] if name in alone else [])]:
            assert np.array_equal(made.tokens, other.tokens) and np.array_equal(made.logprobs, other.logprobs)
        assert made.finish == ("stop" if made.tokens[-1] == 1 else "length") and made.tokens.size <= 40
        np.testing.assert_allclose(made.logprobs, logprobs_of(model, weights(model, 0), made), atol=1e-3)
    assert len({tuple(made.tokens.tolist()) for made in together.values()}) > 6
    assert {made.finish for made in together.values()} == {"stop", "length"}
    spec = spec_of(server)
    learner = TorchLearner(str(model), spec)
    made = together[requests[0].id]
    sample = make_sample(
        spec, 0, 0, prompt_tokens=np.array(requests[0].prompt, np.int32), tokens=made.tokens,
        logprobs=made.logprobs,
    )  # fmt: skip
    batch = micro_batch([TrainingRow(sample, 0, 0)], None, learner.loss, 0)
    with torch.no_grad():
        trainers = learner._forward.logprobs(learner._model, batch).numpy()
    np.testing.assert_allclose(made.logprobs, trainers, atol=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.thorough(but=["False"])
def test_a_delta_is_installed_while_samples_run(
    engine: ServedEngine, model: Path, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file in memory, and over HTTP as from another machine."""
    if recompute:
        monkeypatch.setattr("producers.engines.on_server.this_machine", lambda: "another")
    old, new = weights(model, 0), weights(model, 0)
    for tensor in new.values():
        tensor.view(-1)[::16] *= 1.01
    patch = PatchFile(model_of(old), model_of(new), since="zero", root="one").read()
    assert all(part.positions is not None for part in patch.parts.values())
    requests = [request(number, 200, endless=True) for number in range(18)]  # two of them wait for a slot
    tokens: dict[str, int] = {}
    found: dict[str, DrawnAnswer] = {}

    def installed_midway() -> bool:
        give(engine, old, "zero")
        engine.prepare(patch)
        begin(engine, requests)
        early = wait_for_tokens(engine, 2, of=[one.id for one in requests[:16]])
        tokens.clear()
        tokens.update(engine.install(recompute=recompute))
        assert engine.digests() == digests_of(new)
        found.update(early | rest(engine, 18 - len(early)))
        return any(0 < count < 200 for count in tokens.values())  # on a busy machine all may have ended

    wait_until(installed_midway, what="new weights in the middle of samples", deadline_s=120)
    assert found.keys() == {one.id for one in requests}
    assert all(made.tokens.size == 200 and made.finish == "length" for made in found.values())
    moved = 0.0
    for name, made in found.items():
        before = tokens.get(name, 200)
        first, second = logprobs_of(model, old, made), logprobs_of(model, new, made)
        np.testing.assert_allclose(made.logprobs[:before], first[:before], atol=3e-3)
        if recompute or not before:
            np.testing.assert_allclose(made.logprobs[before:], second[before:], atol=3e-3)
        moved = max(moved, np.abs(made.logprobs[before:] - first[before:]).max(initial=0.0))
    assert moved > 5e-3  # so the old weights did not draw the rest


def test_a_patch_for_other_weights_is_refused(engine: ServedEngine, model: Path) -> None:
    new = model_of(weights(model, 1))
    with pytest.raises(EngineError, match="the patch is for the weights other; the engine holds zero"):
        engine.prepare(PatchFile({}, new, since="other", root="one").read())
    give(engine, weights(model, 2), "two")


def test_samples_are_dropped_handed_over_and_continued(engine: ServedEngine, server: VllmServer) -> None:
    requests = [request(number, 200, endless=True) for number in range(4)]
    parts: list[DrawnAnswer] = []

    def handed_over() -> bool:
        begin(engine, requests)
        wait_for_tokens(engine, 2)
        engine.abort([requests[3].id, "unknown"])
        parts[:] = engine.hand_over([requests[0].id, requests[1].id, "unknown"])
        if len(parts) == 2 and engine.unfinished().keys() == {requests[2].id}:
            return True
        engine.abort([one.id for one in requests])  # some had ended before: once more
        wait_until(lambda: not engine.step(0.1) and not engine.unfinished(), what="their end")
        return False

    wait_until(handed_over, what="samples that are handed over midway", deadline_s=120)
    assert [(part.id, part.finish) for part in parts] == [(requests[0].id, ""), (requests[1].id, "")]
    part = parts[0]
    assert part.tokens.size == part.logprobs.size >= 2
    engine.submit(replace(requests[0], made=part.tokens.tolist()))
    found = rest(engine, 2)
    assert found[requests[0].id].tokens.size == 200 - part.tokens.size and not engine.unfinished()
    assert not engine.pace().keeps_bits
    whole = run(engine, [requests[0]])[requests[0].id]
    assert whole.tokens[: part.tokens.size].tolist() == part.tokens.tolist()
    running = len(re.findall(r"^vllm:num_requests_running\{.*\} 0.0$", metrics(server), re.MULTILINE))
    assert running == 1  # the server dropped what was dropped here


def metrics(server: VllmServer) -> str:
    asked = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=50) as response:
        return str(response.read().decode())


def test_it_rests(engine: ServedEngine) -> None:
    requests = [request(number, 200, endless=True) for number in range(16)]
    begin(engine, requests)
    wait_for_tokens(engine, 1)
    engine.sleep()
    engine.step(0.1)
    before = engine.unfinished()
    engine.step(0.3)
    assert engine.unfinished() == before and min(before.values()) < 200
    engine.wake()
    assert {made.tokens.size for made in rest(engine, 16).values()} == {200}


def test_answers_end_by_the_runs_rules(server: VllmServer, model: Path) -> None:
    sampling = {"max_tokens": 60, "max_prompt_tokens": 56, "stop": ["5", "ab"], "min_tokens": 3}
    made = engine_of(str(model), spec_of(server, sampling=sampling))
    assert isinstance(made, ServedEngine)
    try:
        to_text = stopping_of(str(model), spec_of(server, sampling=sampling)).text
        found = run(made, [request(number, 60) for number in range(24)])
        stopped = [one for one in found.values() if one.finish == "stop"]
        assert len(stopped) > 12 and any(one.tokens[-1] != 1 for one in stopped)
        for one in found.values():
            assert one.tokens.size >= 3 and 1 not in one.tokens[:3]
            assert "5" not in to_text(one.tokens)[3:] and "ab" not in to_text(one.tokens)[3:]
    finally:
        made.close()


def test_the_base_of_an_adapter_is_installed_first(server: VllmServer, model: Path) -> None:
    lora = {"rank": 4, "alpha": 6.0}
    made = engine_of(str(model), spec_of(server, model={"path": str(model), "lora": lora}))
    assert isinstance(made, ServedEngine)
    try:
        assert made.digests() == digests_of(weights(model, 0))
    finally:
        made.close()


def test_what_does_not_fit_is_named_with_its_flag(
    server: VllmServer, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", layers=16)
    spec = spec_of(
        server, model={"path": str(other), "dtype": "bfloat16"},
        generator={"engine": "served", "urls": [server.url, "http://127.0.0.1:9"], "slots": 64},
        sampling={"max_tokens": 300, "max_prompt_tokens": 56}, trainer={"microbatch_tokens": 512},
        placement={"generators": 2},
    )  # fmt: skip
    wanted = (
        "--dtype bfloat16",
        "--max-model-len 356",
        "--max-num-seqs 64",
        "hidden_size: 128 there, 64 here",
    )
    with pytest.raises(EngineError) as refused:
        engine_of(str(other), spec)
    assert refused.value.lasting and all(one in str(refused.value) for one in wanted)
    first, second = look_at_servers(spec, other)
    assert first.wrong and not first.away and all(one in first.line for one in wanted)
    assert second.wrong and second.away and "no server answers at http://127.0.0.1:9" in second.line
    fine = next(look_at_servers(spec_of(server), model))
    assert not fine.wrong and "answers, with 16 slots in float32" in fine.line
    monkeypatch.setenv(KEY_VARIABLE, "another")
    with pytest.raises(EngineError, match=f"set {KEY_VARIABLE} to its VLLM_API_KEY"):
        engine_of(str(model), spec_of(server))


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({}, ""), ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
    ({"cpu_offload_gb": 1.0}, "--cpu-offload-gb"),
    ({"offload_group_size": 2}, "--offload-group-size"),
]  # fmt: skip


def test_facts_are_read_from_vllms_settings(model: Path) -> None:
    """Its settings are made as a server makes them, and none is started."""
    from vllm import EngineArgs

    from producers.engines.server_settings import read_facts

    spec = make_spec(generator={"engine": "served", "urls": "http://a:1", "slots": 8})
    runner = SimpleNamespace(device=torch.device("cpu"), requests={}, get_model=torch.nn.Module)
    for options, flag in SETTINGS:
        given = EngineArgs(
            model=str(model), dtype="float32", max_model_len=256, enable_prefix_caching=False,
            enable_chunked_prefill=False, logprobs_mode="processed_logprobs", **options,
        )  # fmt: skip
        with mock.patch.dict(os.environ):  # vLLM adds to it
            facts = read_facts(given.create_engine_config(), runner, transfers=True)
        problems = wrong_facts(facts, spec, str(model))
        assert len(problems) == bool(flag) and all(flag in one for one in problems)


def test_experts_that_a_check_refuses_are_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.engines import server_settings

    def refuse(model: torch.nn.Module) -> None:
        raise EngineError("they can't be verified there")

    monkeypatch.setattr(server_settings, "check_experts", refuse)
    assert server_settings._unfit_experts(torch.nn.Module()) == "they can't be verified there"


CHANGING = (
    "/start_weight_update", "/update_weights", "/finish_weight_update", "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine", "/pause", "/resume", "/abort_requests", "/update_weight_version",
    "/reset_prefix_cache", "/sleep", "/wake_up", "/collective_rpc", "/v1/load_lora_adapter",
    "/streamrl/patch",
)  # fmt: skip


def test_one_server_serves_one_generator(engine: ServedEngine, server: VllmServer, model: Path) -> None:
    with pytest.raises(EngineError, match="it belongs to a generator of run test on"):
        engine_of(str(model), spec_of(server, deadlines={"start_s": 2.0}))
    requests = [request(number, 200, endless=True) for number in range(4)]
    begin(engine, requests)
    with closing(ServerLink(server.url, key=KEY, deadline_s=100).open()) as outsider:
        for claim in ("", "c" * 32):
            outsider.claim = claim
            for path in CHANGING:
                with pytest.raises(EngineError, match=f"belongs to a generator of run test .* POST {path}"):
                    outsider.post(path, {})
        facts = outsider.facts()
    assert facts["slots"] == 16
    assert (facts["cache_dtype"], facts["offloads"], facts["unfit_experts"]) == ("auto", False, "")
    assert rest(engine, 4).keys() == {one.id for one in requests}
    assert engine.digests() == digests_of(weights(model, 0))


def test_a_patch_that_was_damaged_on_its_way_changes_nothing(
    engine: ServedEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._facts = msgspec.structs.replace(engine._facts, machine="another")
    new = make_patch(weights(model, 1), "one").read()
    with monkeypatch.context() as lie:
        lie.setattr("producers.engines.on_server.blake3", lambda: blake3(b"of something else"))
        with pytest.raises(EngineError, match=r"with status 400: .*its bytes have another hash"):
            engine.prepare(new)
    engine.prepare(new)
    engine.install(recompute=False)
    assert engine.digests() == digests_of(weights(model, 1))


def test_a_whole_run(server: VllmServer, model: Path, tmp_path: Path, kafka: str) -> None:
    generator = {"engine": "served", "urls": server.url, "slots": 8}
    spec = make_spec(generator=generator, algorithm={"mode": "async", "staleness": 1})
    with running(tmp_path / "served", kafka, spec, model) as whole:
        whole.wait_for_steps(3)
        whole.wait_for_end()
        steps, samples = whole.steps(), whole.samples()
        assert not whole.dead_letters()
    assert len(steps) == 3 and {1, 2} & {int(sample.versions[-1]) for sample in samples}


@pytest.mark.thorough
def test_a_server_that_was_killed_is_noticed_and_used_again(
    server: VllmServer, model: Path, tmp_path: Path
) -> None:
    options = EngineOptions(model=str(model), spec=spec_of(server).model_dump_json())
    remote = RemoteEngine(options, threading.Event(), deadline_s=600).open()
    try:
        remote.wait_until_ready()
        remote.prepare(make_patch(weights(model, 1), "one"))
        wait_until(remote.is_ready, what="weights")
        remote.install(recompute=False)
        remote.submit(request(1, 200, endless=True))
        shared = server.shared_memory()
        server.stop(signal.SIGKILL)
        assert shared and not any(file.exists() for file in shared)
        with pytest.raises(EngineError, match=f"(the|no) server .*{server.port}"):
            wait_until(lambda: remote.step(0.1), what="an answer")
    finally:
        remote.close()
    waiting = RemoteEngine(options, threading.Event(), deadline_s=600).open()  # it waits for the server
    try:
        server.start()
        waiting.wait_until_ready()
        waiting.prepare(make_patch(weights(model, 2), "two"))
        wait_until(waiting.is_ready, what="weights")
        waiting.install(recompute=False)
        wait_until(waiting.digests, what="hashes")
        assert waiting.digests() == digests_of(weights(model, 2))
    finally:
        waiting.close()
