"""vLLM itself: weights replaced while it runs, verified; sampling that nothing around it can change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

from consumers.batching import micro_batch
from consumers.learner import TorchLearner
from consumers.rows import Row
from infra.store import open_store
from infra.weights.digest import digests_of
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from producers.engines import sampler
from producers.engines.base import EngineError, Finished, Request
from producers.engines.vllm_engine import VllmEngine
from producers.weights_watch import installable
from tests.factories import make_sample, make_spec, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    import numba  # noqa: F401 - vLLM alone would not start in a process that has it

    # One engine a process is all that vLLM allows. Its cache has 16 blocks of 128 tokens: see the preemption.
    made = VllmEngine(str(model), slots=16, max_model_len=256, kv_cache_mib=1)
    made.load_weights(weights(model, 0))
    yield made
    cleanup_dist_env_and_memory()  # this process is a rank of its own; tests behind these make others


def weights(model: Path, change: int) -> dict[str, torch.Tensor]:
    """The model's weights, moved a little for each change."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)
    return {
        name: tensor.detach() + 0.1 * bool(change) * torch.randn(tensor.shape, generator=noise)
        for name, tensor in net.named_parameters()
    }


def request(number: int, tokens: int = 24) -> Request:
    return Request(f"{number:07d}-00", [4 + number % 9, 5, 6], tokens, 1000 + number, float(tokens))


def run(engine: VllmEngine, requests: list[Request]) -> dict[str, Finished]:
    for one in requests:
        engine.submit(one)
    found: dict[str, Finished] = {}
    while engine.unfinished():
        found |= {finished.id: finished for finished in engine.step()}
    return found


@pytest.fixture
def never_stop(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are as long as they may be."""
    plain = engine._params

    def params_of(tokens: int) -> object:
        params = plain(tokens)
        params.ignore_eos = True
        return params

    monkeypatch.setattr(engine, "_params", params_of)


def reference_logprobs(
    model: Path, tensors: dict[str, torch.Tensor], prompt: list[int], tokens: np.ndarray
) -> np.ndarray:
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.load_state_dict(tensors, strict=False)
    net.tie_weights()
    whole = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logprobs = net(input_ids=whole).logits[0].log_softmax(-1)
    picked = logprobs[len(prompt) - 1 : -1].gather(1, whole[0, len(prompt) :, None])
    return picked[:, 0].numpy()


def test_new_weights_are_held_whole_and_change_the_logprobs(engine: VllmEngine, model: Path) -> None:
    """The stale tied lm_head of vLLM's CPU build would show here: digests alone would not see it."""
    for change in (1, 2, 0):
        tensors = weights(model, change)
        engine.load_weights(tensors)
        assert engine.held_digests() == digests_of(tensors)
        asked = request(change)
        made = run(engine, [asked])[asked.id]
        expected = reference_logprobs(model, tensors, list(asked.prompt), made.tokens)
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "up_proj"], ["0.self_attn.k_proj"]])
def test_an_adapter_changes_its_layers_only(
    engine: VllmEngine, model: Path, tmp_path: Path, targets: str | list[str]
) -> None:
    """As a generator installs it: layers that vLLM fuses with others, and from one version to the next."""
    spec = make_spec(model={"lora": {"rank": 4, "alpha": 6.0, "targets": targets}})
    learner = TorchLearner(str(model), spec)
    store = WeightStore(open_store(f"file://{tmp_path}"), "r-1")
    base, before = ModelFolder(model), weights(model, 0)
    engine.load_weights(before)
    for number in (0, 1, 2):
        noise = torch.Generator().manual_seed(number)
        adapter = learner.weights()
        if number:  # the first one is that of a new run
            adapter = {n: 0.2 * torch.randn(tensor.shape, generator=noise) for n, tensor in adapter.items()}
        store.publish(number, adapter, trainer_epoch=0, base=learner.base)
        version = installable(*store.update(None, number), spec.model, base)
        assert engine.install(version.file, recompute=False).digests == version.digests
        learner.adopt(adapter)
        asked = request(number)
        made = run(engine, [asked])[asked.id]
        expected = reference_logprobs(
            model, before | load(bytes(version.file)), list(asked.prompt), made.tokens
        )
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)
        sample = make_sample(
            spec, 0, 0, prompt_tokens=np.array(asked.prompt, np.int32), tokens=made.tokens,
            logprobs=made.logprobs,
        )  # fmt: skip
        batch = micro_batch([Row(sample, 0, 0)], None, learner.loss, 0)
        with torch.no_grad():
            trainers = learner._forward.logprobs(learner._model, batch).numpy()
        np.testing.assert_allclose(made.logprobs, trainers, atol=1e-4)
    untouched = set(before) - set(version.digests)
    engine._loaded = list(before)
    assert {n: d for n, d in engine.held_digests().items() if n in untouched} == digests_of(
        {name: before[name] for name in untouched}
    )
    engine.load_weights(before)


def test_a_stale_head_is_found(engine: VllmEngine, model: Path) -> None:
    head = engine._model.lm_head
    kept = head.weight
    try:
        head.weight = torch.nn.Parameter(kept.detach().clone() + 1, requires_grad=False)
        with pytest.raises(EngineError, match="lm_head is stale"):
            engine.held_digests()
    finally:
        head.weight = kept


def test_a_sample_has_the_same_bits_whatever_is_in_the_batch(engine: VllmEngine) -> None:
    requests = [request(number, 8 + number % 17) for number in range(40)]
    together = run(engine, requests)
    for one in requests[::5]:
        alone = run(engine, [one])[one.id]
        np.testing.assert_array_equal(alone.tokens, together[one.id].tokens)
        np.testing.assert_array_equal(alone.logprobs, together[one.id].logprobs)


def test_a_sample_that_moves_has_the_same_bits(engine: VllmEngine, never_stop: None) -> None:
    """Handed over again and again, with other neighbours each time."""
    asked = request(3, 40)
    alone = run(engine, [asked])[asked.id]
    tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    for number, steps in enumerate((1, 5, 12)):
        engine.submit(replace(asked, made=tokens.tolist()))
        others = [request(10 + number * 3 + n, 30) for n in range(number * 3)]
        for other in others:
            engine.submit(other)
        for _ in range(steps):
            engine.step()
        (part,) = engine.hand_over([asked.id, "0000099-00"])
        engine.abort([other.id for other in others])
        assert part.id == asked.id and len(part.tokens) == len(part.logprobs) == steps
        tokens, logprobs = np.concatenate([tokens, part.tokens]), np.concatenate([logprobs, part.logprobs])
    last = run(engine, [replace(asked, made=tokens.tolist())])[asked.id]
    np.testing.assert_array_equal(np.concatenate([tokens, last.tokens]), alone.tokens)
    np.testing.assert_array_equal(np.concatenate([logprobs, last.logprobs]), alone.logprobs)
    assert engine.unfinished() == {}


def test_the_same_bits_through_preemption(
    engine: VllmEngine, never_stop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than the KV cache holds: vLLM throws requests out midway and computes them again."""
    requests = [request(number, 200) for number in range(16)]
    expected: dict[str, Finished] = {}
    for start in range(0, 16, 4):
        expected |= run(engine, requests[start : start + 4])
    preempted = 0
    for one in requests:
        engine.submit(one)
    found: dict[str, Finished] = {}
    while engine.unfinished():
        found |= {finished.id: finished for finished in engine.step()}
        preempted += sum(r.num_preemptions for r in engine._scheduler.requests.values())
    assert preempted > 0, "the cache was large enough: this test shows nothing"
    for one in requests:
        np.testing.assert_array_equal(found[one.id].tokens, expected[one.id].tokens)
        np.testing.assert_array_equal(found[one.id].logprobs, expected[one.id].logprobs)


def test_a_profile_is_there_before_work_and_changes_no_bits(engine: VllmEngine) -> None:
    requests = [request(number) for number in range(8)]
    before = run(engine, requests)
    engine.profile()
    pace = engine.pace()
    assert pace.batches[:2] == [1, 8]
    assert all(0 < seconds < 1 for seconds in pace.seconds)
    assert engine.unfinished() == {}
    after = run(engine, requests)
    for one in requests:
        np.testing.assert_array_equal(after[one.id].tokens, before[one.id].tokens)
        np.testing.assert_array_equal(after[one.id].logprobs, before[one.id].logprobs)


def test_requests_can_be_forgotten(engine: VllmEngine) -> None:
    for number in range(4):
        engine.submit(request(number))
    engine.step()
    assert set(engine.unfinished()) == {request(number).id for number in range(4)}
    engine.abort([request(1).id])
    assert set(engine.unfinished()) == {request(number).id for number in (0, 2, 3)}
    while engine.unfinished():
        engine.step()


def shifted(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Draw as for a sample that has `tokens` tokens already."""
    plain = sampler.uniforms
    monkeypatch.setattr(sampler, "uniforms", lambda seeds, at: plain(seeds, at + tokens))


@pytest.mark.parametrize("budget", [2048, 40])
@pytest.mark.parametrize("recompute", [True, False])
def test_what_running_samples_go_on_with(
    engine: VllmEngine, model: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool, budget: int
) -> None:
    """Recomputed, a sample goes on as a fresh engine does from its prompt and tokens so far; else not.

    A small budget cuts the prefill into pieces, between which others decode.
    """
    monkeypatch.setattr(engine._scheduler, "max_num_scheduled_tokens", budget)
    requests = [request(number, 40 + number) for number in range(9)]
    engine.load_weights(weights(model, 0))
    for one in requests:
        engine.submit(one)
    for _ in range(14):
        engine.step()
    new = weights(model, 3)
    made = engine.install(save(new), recompute=recompute).tokens
    assert len(made) > 3 and max(made.values()) > 9
    found: dict[str, Finished] = {}
    while engine.unfinished():
        found |= {finished.id: finished for finished in engine.step()}
    same = []
    for one in (one for one in requests if one.id in made):
        before = made[one.id]
        with monkeypatch.context() as patch:
            shifted(patch, before)
            so_far = [*one.prompt, *found[one.id].tokens[:before].tolist()]
            fresh = Request(f"9{one.id[1:]}", so_far, one.max_tokens - before, one.seed, one.priority)
            expected = run(engine, [fresh])[fresh.id]
        same.append(
            np.array_equal(found[one.id].tokens[before:], expected.tokens)
            and np.array_equal(found[one.id].logprobs[before:], expected.logprobs)
        )
    engine.load_weights(weights(model, 0))
    assert same == [recompute] * len(made)


def test_weights_change_between_two_steps(engine: VllmEngine, model: Path) -> None:
    asked = request(7, 24)
    engine.load_weights(weights(model, 0))
    before = run(engine, [asked])[asked.id]
    engine.submit(asked)
    for _ in range(6):
        engine.step()
    made = engine.unfinished()[asked.id]
    engine.load_weights(weights(model, 3))
    after: dict[str, Finished] = {}
    while engine.unfinished():
        after |= {finished.id: finished for finished in engine.step()}
    engine.load_weights(weights(model, 0))
    np.testing.assert_array_equal(after[asked.id].logprobs[:made], before.logprobs[:made])
    assert not np.array_equal(after[asked.id].logprobs[made : made + 4], before.logprobs[made : made + 4])
