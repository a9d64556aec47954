"""An engine with weights in eight bits on a GPU: rounded to the same bits, verified, batch-invariant."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.weights.bits import bits_of
from infra.weights.digest import model_digests
from infra.weights.eight_bits import EIGHT_BITS
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engine_form import EngineForm
from producers.engines.eight_bit_linear import rounded_weight
from producers.engines.engine import DrawnAnswer, SampleRequest
from producers.engines.engine_messages import EngineOptions
from producers.engines.remote import RemoteEngine
from tests.bench._gpu_model import sized_model
from tests.factories import make_spec
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sized_model(tmp_path_factory.mktemp("model"), "tiny", "cpu")


@pytest.fixture(scope="module", params=sorted(EIGHT_BITS))
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[RemoteEngine]:
    spec = make_spec(
        generator={
            "slots": 16, "gpu_memory": 0.2, "quantization": request.param,
        },
        loss={"correction": "truncated", "correct_fresh": True}, model={"dtype": "bfloat16"},
        sampling={"max_tokens": 100, "max_prompt_tokens": 32}, trainer={"microbatch_tokens": 4096},
    )  # fmt: skip
    options = EngineOptions(model=str(model), spec=spec.model_dump_json())
    made = RemoteEngine(options, threading.Event(), deadline_s=300).open()
    made.wait_until_ready()
    plain, form = ModelFolder(model).bits(), EngineForm(model, spec.generator)
    rounded, digests = form.rounded(plain, model_digests(plain))
    made.prepare(PatchFile({}, rounded, since=None, root="0"))
    wait_until(made.is_ready, what="its being ready")
    made.install(recompute=False)
    wait_until(lambda: made.digests() is not None, what="what it holds")
    assert made.digests() == form.held(rounded, digests)
    yield made
    made.close()


def run(engine: RemoteEngine, numbers: list[int]) -> dict[str, DrawnAnswer]:
    for number in numbers:
        prompt = [2 + number % 400, *range(5, 6 + number % 20)]
        engine.submit(SampleRequest(f"{number:07d}-00", prompt, 60, number, 1.0, endless=True))
    found: dict[str, DrawnAnswer] = {}

    def all_there() -> bool:
        found.update({finished.id: finished for finished in engine.step(0.2)})
        return len(found) == len(numbers)

    wait_until(all_there, what=f"{len(numbers)} samples")
    return found


@pytest.mark.parametrize("kind", sorted(EIGHT_BITS))
def test_a_gpu_rounds_to_the_bits_that_generators_expect(kind: str) -> None:
    weight = torch.randn(300, 257).mul(0.02).bfloat16()
    codes, scales = EIGHT_BITS[kind].rounded(bits_of(weight))
    there, by = rounded_weight(weight.cuda(), kind)
    assert codes.data.tobytes() == there.cpu().view(torch.uint8).numpy().tobytes()
    assert scales.data.tobytes() == by.cpu().numpy().tobytes()


def test_a_sample_has_the_same_bits_in_any_batch(engine: RemoteEngine) -> None:
    together = run(engine, list(range(40)))
    backwards = run(engine, list(range(40))[::-1])
    alone = {name: one for number in (0, 13, 39) for name, one in run(engine, [number]).items()}
    for name, one in {**backwards, **alone}.items():
        np.testing.assert_array_equal(one.tokens, together[name].tokens)
        np.testing.assert_array_equal(one.logprobs, together[name].logprobs)
