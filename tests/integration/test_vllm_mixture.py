"""vLLM with mixtures of experts: weights in place by expert, and routes as they were taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory

from consumers.learners.expert_routing import routers
from infra.weights.bits import model_of
from infra.weights.digest import digests_of
from infra.weights.patch import PatchFile
from producers.engines.engine import DrawnAnswer, EngineError, SampleRequest
from producers.engines.history_drafter import HistoryDrafter
from producers.engines.vllm_in_process import VllmEngine
from tests.engine_draws import run
from tests.factories import TINY_MIXTURES, make_patch, make_tiny_mixture
from tests.integration.test_vllm_speculation import Liar

PROMPT = [4, 5, 6]


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mixture(tmp_path_factory.mktemp("model") / request.param, request.param)


def made(model: Path, dtype: str = "float32", *, guesses: bool = False) -> VllmEngine:
    """An engine whose cache has 16 blocks of 128 tokens, for at most as many samples."""
    return VllmEngine(
        str(model), dtype=dtype, slots=16, max_model_len=256, kv_cache_mib=1, routes=True,
        drafter=HistoryDrafter() if guesses else None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    yield made(model)
    cleanup_dist_env_and_memory()  # one engine a process is all that vLLM allows at a time


def weights(model: Path, change: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The trainer's tensors; with a change, a tenth of their elements are moved."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)
    found = {}
    for name, tensor in net.named_parameters():
        some = torch.rand(tensor.shape, generator=noise) < 0.1 * bool(change)
        moved = tensor.detach() + 0.1 * some * torch.randn(tensor.shape, generator=noise)
        found[name] = moved.to(dtype)
    return found


def give(engine: VllmEngine, patch: PatchFile, tensors: Mapping[str, torch.Tensor]) -> None:
    engine.prepare(patch.read())
    engine.install(recompute=False)
    assert engine.digests().items() >= digests_of(tensors).items()


def request(number: int, tokens: int = 24, made: tuple[int, ...] = ()) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", PROMPT, tokens, 1000 + number, float(tokens), made)


def equal(one: DrawnAnswer, other: DrawnAnswer) -> bool:
    assert one.routes is not None and other.routes is not None
    return (
        np.array_equal(one.tokens, other.tokens) and one.logprobs.tobytes() == other.logprobs.tobytes()
        and np.array_equal(one.routes, other.routes)
    )  # fmt: skip


def by_transformers(
    model: Path, tensors: Mapping[str, torch.Tensor], answer: DrawnAnswer
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logprobs of an answer's tokens and the routes of all, as transformers computes them."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.load_state_dict(dict(tensors))
    chosen: list[torch.Tensor] = []
    for router in routers(net):
        router.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
    whole = torch.tensor([[*PROMPT, *answer.tokens.tolist()]])
    with torch.no_grad():
        logprobs = net(input_ids=whole).logits[0].log_softmax(-1)
    picked = logprobs[len(PROMPT) - 1 : -1].gather(1, whole[0, len(PROMPT) :, None])
    return picked[:, 0].numpy(), torch.stack(chosen, dim=1).sort(dim=-1).values.numpy()[:-1]


def test_weights_change_in_place_and_samples_have_their_routes(engine: VllmEngine, model: Path) -> None:
    for change in (1, 2, 0):
        tensors = weights(model, change)
        give(engine, make_patch(tensors), tensors)
        (answer,) = run(engine, [request(change)]).values()
        logprobs, routes = by_transformers(model, tensors, answer)
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-4)
        assert answer.routes is not None and answer.routes.dtype == np.uint8
        assert np.array_equal(answer.routes, routes)


def test_a_folders_own_names_are_found_and_are_the_same_memory(engine: VllmEngine, model: Path) -> None:
    """As they come for an adapter's base, expert by expert."""
    tensors, folder = weights(model, 0), load_file(model / "model.safetensors")
    give(engine, make_patch(tensors), tensors)
    assert len(folder) > len(tensors)
    give(engine, make_patch(folder), folder)
    name = next(one for one in folder if ".experts.1." in one and ("up_proj" in one or ".w3." in one))
    part = engine.weights.tensor(name)
    layer = name.partition(".experts.")[0].replace("block_sparse_moe", "mlp")
    whole = engine.weights.tensor(f"{layer}.experts.gate_up_proj")
    assert part.is_contiguous() and part.data_ptr() == whole[1, len(part) :].data_ptr()
    with pytest.raises(EngineError, match=r"experts\.99\..*: it is of expert 99, and the engine has"):
        give(engine, make_patch({name.replace(".1.", ".99."): folder[name]}), {})
    odd = f"{layer}.experts.1.up_proj.weight"
    with pytest.raises(EngineError, match=r"up_proj.weight .*\[8, 64\]"):
        give(engine, make_patch({odd: folder[name][:8].clone()}), {})


def test_bits_depend_neither_on_neighbours_nor_on_preemption(engine: VllmEngine, model: Path) -> None:
    tensors = weights(model, 0)
    give(engine, make_patch(tensors), tensors)
    asked = [request(number, 200) for number in range(12)]  # more than the cache holds: some are preempted
    together = run(engine, asked)
    for one in asked[::3]:
        assert equal(run(engine, [one])[one.id], together[one.id])


def test_a_sample_that_moves_keeps_bits_and_routes(engine: VllmEngine, model: Path) -> None:
    tensors = weights(model, 0)
    give(engine, make_patch(tensors), tensors)
    asked = request(3, 60)
    (whole,) = run(engine, [asked]).values()
    engine.submit(asked)
    for _ in range(9):
        engine.step()
    (part,) = engine.hand_over([asked.id])
    assert part.routes is not None and len(part.routes) == len(PROMPT) + part.tokens.size - 1
    (rest,) = run(engine, [request(3, 60, tuple(part.tokens.tolist()))]).values()
    assert rest.routes is not None and whole.routes is not None
    assert np.array_equal(rest.routes, whole.routes)
    assert np.array_equal(part.routes, whole.routes[: len(part.routes)])
    engine.submit(asked)
    engine.step()
    engine.abort([asked.id])
    assert not engine._routes._open  # type: ignore[union-attr]


def test_a_token_keeps_the_route_by_which_the_next_one_was_drawn(engine: VllmEngine, model: Path) -> None:
    """New weights compute the tokens before them again, by other experts."""
    old, new = weights(model, 0), {name: -one for name, one in weights(model, 0).items()}
    give(engine, make_patch(old), old)
    asked = request(5, 40)
    (by_old,) = run(engine, [asked]).values()
    engine.submit(asked)
    for _ in range(8):
        engine.step()
    engine.prepare(make_patch(new).read())
    (drawn,) = engine.install(recompute=True).values()
    found: dict[str, DrawnAnswer] = {}
    while engine.unfinished():
        found |= {one.id: one for one in engine.step()}
    mixed = found[asked.id]
    before = len(PROMPT) + drawn - 1
    assert mixed.routes is not None and by_old.routes is not None
    assert np.array_equal(mixed.routes[:before], by_old.routes[:before])
    _, by_new = by_transformers(model, new, mixed)
    assert np.array_equal(mixed.routes[before:], by_new[before:])
    assert not np.array_equal(mixed.routes[:before], by_new[:before])


@pytest.mark.parametrize("kind", TINY_MIXTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.thorough(but=["float32-mixtral", "bfloat16-qwen3_moe"])
def test_a_delta_makes_the_engine_that_a_fresh_start_makes(kind: str, dtype: str, tmp_path: Path) -> None:
    """So nothing that is computed with is a copy of what was loaded."""
    model, kept = make_tiny_mixture(tmp_path / "model", kind), getattr(torch, dtype)
    old, new = weights(model, 0, kept), weights(model, 1, kept)
    engine = made(model, dtype)
    before = run(engine, [request(number) for number in range(4)])
    give(engine, make_patch(old, root="old"), old)
    delta = PatchFile(model_of(old), model_of(new), since="old", root="new")
    give(engine, delta, new)
    patched = run(engine, [request(number) for number in range(4)])
    cleanup_dist_env_and_memory()
    net = AutoModelForCausalLM.from_pretrained(model, dtype=kept)
    net.load_state_dict(new)
    net.save_pretrained(model)
    fresh = run(made(model, dtype), [request(number) for number in range(4)])
    cleanup_dist_env_and_memory()
    assert all(equal(patched[name], fresh[name]) for name in fresh)
    assert not any(equal(patched[name], before[name]) for name in fresh)


@pytest.mark.thorough
def test_guesses_change_no_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_mixture(tmp_path / "model", "qwen3_moe")
    engines, found = list[VllmEngine](), list[dict[str, DrawnAnswer]]()
    for guesses in (False, True):
        engines.append(
            engine := made(model, guesses=guesses)
        )  # one that goes away ends the next one's groups
        if engine._speculation:
            plan = engine._speculation._plan  # whatever is drafted is used
            monkeypatch.setattr(engine._speculation, "_drafter", Liar())
            monkeypatch.setattr(plan, "attention", lambda samples: samples)
            monkeypatch.setattr(plan, "least_chance", lambda samples: 0.0)
            monkeypatch.setattr(
                plan, "lengths", lambda samples, looked, chances: [len(one) for one in chances]
            )
        found.append(run(engine, [request(number % 2 + 10 * number, 60) for number in range(6)]))
        cleanup_dist_env_and_memory()
    assert engines[1].pace().drafted > 0
    assert all(equal(found[0][name], found[1][name]) for name in found[0])
