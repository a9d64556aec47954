"""vLLM with weights in eight bits: verified, exact in updates, and as a model with rounded layers draws."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.weights.bits import Model, model_of
from infra.weights.digest import model_digests
from infra.weights.eight_bits import has_eight_bits
from infra.weights.patch import PatchFile
from producers.engine_form import EngineForm
from producers.engines.eight_bit_linear import rounded_weight
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.waiting import wait_until

DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def spec_of(kind: str, ranks: int = 1) -> RunSpec:
    generator = {"slots": 8, "kv_cache_mib": 2, "tensor_parallel": ranks, "quantization": kind}
    sampling = {"max_tokens": 200, "max_prompt_tokens": 56}
    loss = {"correction": "truncated", "correct_fresh": True}
    return make_spec(generator=generator, sampling=sampling, loss=loss, trainer={"microbatch_tokens": 256})


class Verified:
    """An engine, and the weights that it holds."""

    def __init__(self, model: Path, kind: str, ranks: int = 1) -> None:
        spec = spec_of(kind, ranks)
        options = EngineOptions(model=str(model), spec=spec.model_dump_json())
        self.kind, self._form = kind, EngineForm(model, spec.generator)
        self.remote = RemoteEngine(options, threading.Event(), deadline_s=DEADLINE_S).open()
        self.remote.wait_until_ready()

    def give(self, new: Model, old: Model | None = None, *, recompute: bool = False) -> int:
        """Install weights, and see that it holds them rounded. Return how many tensors were sent."""
        rounded, digests = self._form.rounded(new, model_digests(new))
        before = {} if old is None else self._form.rounded(old, model_digests(old))[0]
        since = None if old is None else root(old)
        patch = PatchFile(before, rounded, since=since, root=root(new))
        self.remote.prepare(patch)
        wait_until(self.remote.is_ready, what="its being ready")
        self.remote.install(recompute=recompute)
        wait_until(self.remote.digests, what="what it holds")
        assert self.remote.digests() == self._form.held(rounded, digests)
        return len(patch.read().parts)

    def run(self, requests: Sequence[SampleRequest]) -> dict[str, DrawnAnswer]:
        for one in requests:
            self.remote.submit(one)
        found: dict[str, DrawnAnswer] = {}

        def all_there() -> bool:
            found.update({answer.id: answer for answer in self.remote.step(0.2)})
            return len(found) == len(requests)

        wait_until(all_there, what=f"{len(requests)} samples")
        return found


def root(model: Model) -> str:
    return model_digests(model)["model.layers.0.mlp.up_proj.weight"]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[Verified]:
    made = Verified(model, request.param)
    made.give(model_of(weights(model)))
    yield made
    made.remote.close()


def weights(model: Path, change: int = 0, share: float = 1.0) -> dict[str, torch.Tensor]:
    """The model's weights; a share of them moved by a little."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(change)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        step = 0.1 * bool(change) * torch.randn(tensor.shape, generator=noise)
        return tensor + step * (torch.rand(tensor.shape, generator=noise) < share)

    return {name: moved(tensor.detach()).contiguous() for name, tensor in net.named_parameters()}


def request(number: int) -> SampleRequest:
    return SampleRequest(f"{number:07d}-00", [4 + number % 9, 5, 6], 8 + number % 40, 1000 + number, 1.0)


def same_bits(one: DrawnAnswer, other: DrawnAnswer) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert len(one.logprobs) == len(one.tokens) > 0


def rounded_logprobs(
    model: Path, kind: str, tensors: dict[str, torch.Tensor], asked: SampleRequest, tokens: np.ndarray
) -> np.ndarray:
    """The logprobs of transformers' model, whose linear layers round weights and activations."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net.load_state_dict(tensors, strict=False)
    net.tie_weights()

    def rounded(values: torch.Tensor) -> torch.Tensor:
        codes, scale = rounded_weight(values.reshape(-1, values.shape[-1]), kind)
        return (codes.float() * scale[:, None]).view(values.shape)

    for name, layer in net.named_modules():
        if isinstance(layer, torch.nn.Linear) and has_eight_bits(name):
            layer.weight.data = rounded(layer.weight.data)
            layer.register_forward_pre_hook(lambda layer, given: (rounded(given[0]),))
    whole = torch.tensor([[*asked.prompt, *tokens.tolist()]])
    with torch.no_grad():
        logprobs = net(input_ids=whole).logits[0].log_softmax(-1)
    begin = len(asked.prompt)
    return logprobs[begin - 1 : -1].gather(1, whole[0, begin:, None])[:, 0].numpy()


def test_it_draws_as_a_model_whose_layers_round(engine: Verified, model: Path) -> None:
    """Nearly always: rounding to eight bits makes a last bit that differs a whole step, here and there."""
    for change in (1, 0):
        tensors = weights(model, change)
        engine.give(model_of(tensors))
        gaps = []
        for name, answer in engine.run([request(number) for number in range(12)]).items():
            asked = request(int(name[:7]))
            gaps.append(answer.logprobs - rounded_logprobs(model, engine.kind, tensors, asked, answer.tokens))
        apart = np.abs(np.concatenate(gaps))
        assert np.median(apart) < 1e-4 and apart.mean() < 0.02


def test_a_sample_has_the_same_bits_in_any_batch(engine: Verified) -> None:
    assert engine.remote.pace().keeps_bits
    requests = [request(number) for number in range(40)]
    together = engine.run(requests)
    backwards = engine.run(requests[::-1])
    for one in requests:
        same_bits(backwards[one.id], together[one.id])
    for one in requests[::13]:
        same_bits(engine.run([one])[one.id], together[one.id])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_change_of_some_weights_leaves_what_a_whole_version_would(
    engine: Verified, model: Path, recompute: bool
) -> None:
    old, new = model_of(weights(model)), model_of(weights(model, change=1, share=0.01))
    whole = engine.give(old)
    assert 0 < engine.give(new, old, recompute=recompute) <= whole
    fresh = engine.run([request(3)])
    engine.give(new)
    same_bits(engine.run([request(3)])[request(3).id], fresh[request(3).id])
    engine.give(old)


@pytest.mark.thorough
def test_ranks_hold_slices_of_rounded_weights(model: Path) -> None:
    engine = Verified(model, "int8", ranks=2)
    try:
        tensors = weights(model, change=1)
        engine.give(model_of(weights(model)))
        engine.give(model_of(tensors), model_of(weights(model)))
        requests = [request(number) for number in range(20)]
        together = engine.run(requests)
        for one in requests[::7]:
            same_bits(engine.run([one])[one.id], together[one.id])
        gaps = [
            answer.logprobs - rounded_logprobs(model, "int8", tensors, request(int(name[:7])), answer.tokens)
            for name, answer in together.items()
        ]
        # a rank rounds its slice of the activations, by its own largest one
        assert np.abs(np.concatenate(gaps)).mean() < 0.2
    finally:
        engine.remote.close()
