"""vLLM itself: weights replaced while it runs, verified; sampling that nothing around it can change."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from flows.run.inspection.supported_models import head_sizes
from infra.stores.opening import open_store
from infra.weights.bits import Bits, model_of
from infra.weights.digest import digests_of, model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from infra.weights.versions import WeightStore
from producers.engines import sampler
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest
from producers.engines.measured_steps import measure_steps
from producers.engines.vllm_in_process import GpuMemory, VllmEngine
from producers.installing import Newest
from tests.engine_draws import check_begins, finish, run
from tests.factories import make_patch, make_sample, make_spec, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    import numba  # noqa: F401 - vLLM alone would not start in a process that has it

    # One engine a process is all that vLLM allows. Its cache has 16 blocks of 128 tokens: see the preemption.
    options = {"max_num_batched_tokens": 4096}
    made = VllmEngine(str(model), slots=16, max_model_len=256, kv_cache_mib=1, options=options)
    give(made, weights(model, 0))
    yield made
    cleanup_dist_env_and_memory()  # this process is a rank of its own; tests behind these make others


def test_options_reach_vllm_and_unknown_ones_are_named(model: Path, engine: VllmEngine) -> None:
    assert engine._engine.vllm_config.scheduler_config.max_num_batched_tokens == 4096
    with pytest.raises(EngineError, match=r"generator.options.'block_sise': .* there are block_size"):
        VllmEngine(str(model), options={"block_sise": 32})


def weights(model: Path, change: int) -> dict[str, torch.Tensor]:
    """The model's weights, moved a little for each change."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)
    return {
        name: tensor.detach() + 0.1 * bool(change) * torch.randn(tensor.shape, generator=noise)
        for name, tensor in net.named_parameters()
    }


def tensors_of(model: Mapping[str, Bits]) -> dict[str, torch.Tensor]:
    """Of float32 bits."""
    return {
        name: torch.from_numpy(bits.data.view(np.float32)).view(bits.shape) for name, bits in model.items()
    }


def give(
    engine: VllmEngine, tensors: Mapping[str, torch.Tensor], *, recompute: bool = False
) -> dict[str, int]:
    """Let it hold other weights."""
    engine.prepare(make_patch(tensors).read())
    tokens = engine.install(recompute=recompute)
    assert engine.digests().items() >= digests_of(tensors).items()
    return tokens


def request(number: int, tokens: int = 24) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", [4 + number % 9, 5, 6], tokens, 1000 + number, float(tokens))


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
        give(engine, tensors)
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
    newest, before = Newest(spec.model, ModelFolder(model), spec.generator), weights(model, 0)
    copy, held = None, dict[str, Bits]()
    give(engine, before)
    for number in (0, 1, 2):
        noise = torch.Generator().manual_seed(number)
        adapter = learner.weights()
        if number:  # the first one is that of a new run
            adapter = {n: 0.2 * torch.randn(tensor.shape, generator=noise) for n, tensor in adapter.items()}
        store.publish(number, adapter, trainer_epoch=0, base=learner.base)
        manifest, copy = store.update(copy, number)
        version = newest.version(manifest, copy)
        assert version.claim()
        version.patch.read().apply(held)
        engine.prepare(version.patch.read())
        engine.install(recompute=False)
        assert engine.digests().items() >= version.digests.items()
        learner.adopt(adapter)
        asked = request(number)
        made = run(engine, [asked])[asked.id]
        expected = reference_logprobs(model, before | tensors_of(held), list(asked.prompt), made.tokens)
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)
        sample = make_sample(
            spec, 0, 0, prompt_tokens=np.array(asked.prompt, np.int32), tokens=made.tokens,
            logprobs=made.logprobs,
        )  # fmt: skip
        batch = micro_batch([TrainingRow(sample, 0, 0)], None, learner.loss, 0)
        with torch.no_grad():
            trainers = learner._forward.logprobs(learner._model, batch).numpy()
        np.testing.assert_allclose(made.logprobs, trainers, atol=1e-4)
    untouched = set(before) - set(version.digests)
    assert digests_of({name: engine.weights.tensor(name) for name in untouched}) == digests_of(
        {name: before[name] for name in untouched}
    )
    give(engine, before)


def test_weights_are_made_ready_while_others_decode(engine: VllmEngine, model: Path) -> None:
    """In a thread beside its steps, patch after patch: what is not installed yet changes no bit."""
    asked = [request(number, 40) for number in range(6)]
    versions = [model_of(weights(model, change)) for change in (0, 3)]
    alone = run(engine, asked)
    with ThreadPoolExecutor(1) as beside:
        for number in range(8):
            old, new = versions[number % 2], versions[(number + 1) % 2]
            since = str(number) if number else None
            patch = PatchFile(old if number else {}, new, since=since, root=str(number + 1)).read()
            for one in asked:
                engine.submit(one)
            found: dict[str, DrawnAnswer] = {}
            ready = beside.submit(engine.prepare, patch)
            while engine.unfinished() or not ready.done():
                found |= {finished.id: finished for finished in engine.step()}
            ready.result()
            if number % 2 == 0:
                for one in asked:
                    np.testing.assert_array_equal(found[one.id].tokens, alone[one.id].tokens)
                    np.testing.assert_array_equal(found[one.id].logprobs, alone[one.id].logprobs)
            engine.install(recompute=False)
            assert beside.submit(engine.digests).result() == model_digests(new)
    after = run(engine, asked)
    for one in asked:
        np.testing.assert_array_equal(after[one.id].logprobs, alone[one.id].logprobs)


def test_a_few_bits_that_are_not_the_patch_s_are_found(engine: VllmEngine, model: Path) -> None:
    old = model_of(weights(model, 0))
    name = "model.layers.1.mlp.up_proj.weight"
    data = old[name].data.copy()
    data[::100] ^= 1
    new = old | {name: Bits(old[name].dtype, old[name].shape, data)}
    engine.prepare(PatchFile({}, old, since=None, root="old").read())
    engine.install(recompute=False)
    engine.prepare(PatchFile(old, new, since="old", root="new").read())
    engine.install(recompute=False)
    engine.weights.tensor(name)[3, 3] += 1
    found = engine.digests()
    assert {n for n, digest in model_digests(new).items() if found[n] != digest} == {name}
    give(engine, weights(model, 0))


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
    assert engine.pace().keeps_bits, "so samples may move"


def test_the_same_bits_through_preemption(
    engine: VllmEngine, never_stop: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than the KV cache holds: vLLM throws requests out midway and computes them again."""
    requests = [request(number, 200) for number in range(16)]
    expected: dict[str, DrawnAnswer] = {}
    for start in range(0, 16, 4):
        expected |= run(engine, requests[start : start + 4])
    preempted = 0
    for one in requests:
        engine.submit(one)
    found: dict[str, DrawnAnswer] = {}
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
    measure_steps(engine, 16)
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
    give(engine, weights(model, 0))
    for one in requests:
        engine.submit(one)
    for _ in range(14):
        engine.step()
    new = weights(model, 3)
    made = give(engine, new, recompute=recompute)
    assert len(made) > 3 and max(made.values()) > 9
    found = finish(engine)
    same = []
    for one in (one for one in requests if one.id in made):
        before = made[one.id]
        with monkeypatch.context() as patch:
            shifted(patch, before)
            so_far = [*one.prompt, *found[one.id].tokens[:before].tolist()]
            fresh = SampleRequest(f"9{one.id[1:]}", so_far, one.max_tokens - before, one.seed, one.priority)
            expected = run(engine, [fresh])[fresh.id]
        same.append(
            np.array_equal(found[one.id].tokens[before:], expected.tokens)
            and np.array_equal(found[one.id].logprobs[before:], expected.logprobs)
        )
    give(engine, weights(model, 0))
    assert same == [recompute] * len(made)


def test_weights_change_between_two_steps(engine: VllmEngine, model: Path) -> None:
    asked = request(7, 24)
    give(engine, weights(model, 0))
    before = run(engine, [asked])[asked.id]
    engine.submit(asked)
    for _ in range(6):
        engine.step()
    made = engine.unfinished()[asked.id]
    give(engine, weights(model, 3))
    after = finish(engine)
    give(engine, weights(model, 0))
    np.testing.assert_array_equal(after[asked.id].logprobs[:made], before.logprobs[:made])
    assert not np.array_equal(after[asked.id].logprobs[made : made + 4], before.logprobs[made : made + 4])


def long_request(index: int, prompt: int = 150) -> SampleRequest:
    """One of a group, whose prompt fills a block of the KV cache and a part of the next."""
    return SampleRequest(f"0000050-{index:02d}", [4 + n % 9 for n in range(prompt)], 20, 500 + index, 20.0)


@pytest.fixture
def unshared(engine: VllmEngine, model: Path) -> dict[int, list[DrawnAnswer]]:
    """A group that is drawn sample by sample and shares nothing, by each of two versions of the weights."""
    found = {}
    group = [replace(long_request(index), endless=True) for index in range(24)]
    for change in (3, 0):
        give(engine, weights(model, change))
        found[change] = [run(engine, [one])[one.id] for one in group]
    return found


def test_a_group_computes_its_prompt_once_and_has_the_same_bits(
    engine: VllmEngine, unshared: dict[int, list[DrawnAnswer]]
) -> None:
    before = engine.pace().shared
    check_begins(run(engine, [long_request(index) for index in range(24)]), unshared[0])
    assert engine.pace().shared - before >= 23 * 128


@pytest.mark.parametrize("recompute", [True, False])
def test_new_weights_find_nothing_that_older_ones_computed(
    engine: VllmEngine, model: Path, unshared: dict[int, list[DrawnAnswer]], recompute: bool
) -> None:
    """Neither do samples that waited for a slot when the weights came."""
    for index in range(20):
        engine.submit(long_request(index))
    for _ in range(3):
        engine.step()
    begun = {name for name, tokens in engine.unfinished().items() if tokens}
    assert 0 < len(begun) < 20
    give(engine, weights(model, 3), recompute=recompute)
    for index in range(20, 24):
        engine.submit(long_request(index))
    found = finish(engine)
    check_begins(found, [one for one in unshared[3] if one.id not in begun])
    give(engine, weights(model, 0))
    check_begins(run(engine, [long_request(index) for index in range(24)]), unshared[0])


HEADS = """
import torch
import vllm._custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

def known(size):
    begins, length = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    try:
        ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=2, num_kv_heads=1, head_dim=size, seq_lens=length, dtype=torch.float32,
            query_start_loc=begins, causal=True, sliding_window_size=-1,
            isa=_get_attn_isa(torch.float32, 128, size), enable_kv_split=False,
        )
    except RuntimeError:
        return False
    return True

print("sizes", *(size for size in range(4, 641, 4) if known(size)))
"""


@pytest.mark.thorough
def test_the_sizes_of_heads_that_a_start_allows_are_those_of_the_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", HEADS], capture_output=True, text=True, check=True)
    line = done.stdout.splitlines()[-1].split()
    assert tuple(map(int, line[1:])) == head_sizes()


LAYOUTS = """
from concurrent.futures import ThreadPoolExecutor
import torch
torch.set_num_threads(1)  # a thread that has computed nothing has as many as there are cores
from vllm.platforms import current_platform
current_platform.import_kernels()
from producers.engines.packed_linear import PackedLinear
from producers.engines.scatter import HeldWeights
from tests.factories import make_patch

for rows in (48, 64, 96, 128, 160, 192, 256, 384):
    model = torch.nn.Sequential(torch.nn.Linear(64, rows, bias=False)).requires_grad_(False)
    layer = PackedLinear(model[0], invariant=True, known={})
    held = HeldWeights(model, {"0.weight": [rows, 64]}, [layer])
    layer(torch.randn(8, 64), model[0].weight)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(held.prepare, make_patch({"0.weight": torch.randn(rows, 64)}).read()).result()
    held.take()
    for count in (8, 16, 32):
        x = torch.randn(count, 64)
        torch.testing.assert_close(layer(x, model[0].weight), x @ model[0].weight.t(), rtol=1e-4, atol=1e-4)
"""


def test_layers_that_a_fresh_thread_has_packed_multiply_by_their_weights() -> None:
    """oneDNN lays weights out by the number of threads; hashes of the weights would not see it."""
    subprocess.run([sys.executable, "-c", LAYOUTS], check=True)


def test_vllm_has_the_sleep_mode_that_gpus_need(engine: VllmEngine) -> None:
    """There is no GPU here to sleep on; that vLLM still takes these arguments can be said without."""
    from vllm import EngineArgs, LLMEngine

    arguments = {field.name for field in dataclasses.fields(EngineArgs)}
    assert GpuMemory(0.5, sleeps=True).arguments().keys() <= arguments
    inspect.signature(LLMEngine.sleep).bind(engine, level=1, mode="keep")
    inspect.signature(LLMEngine.wake_up).bind(engine)
    engine.submit(SampleRequest("0000001-00", [4, 5], 8, 1, 0.0))
    engine.step()
    engine.sleep()  # on a CPU it only rests
    engine.wake()
    made = []
    while not made:
        made = engine.step()
    assert made[0].id == "0000001-00"
