"""An engine with weights in eight bits on a GPU: rounded to the same bits, verified, batch-invariant.

It guesses tokens, too: guesses don't depend on weights, and another engine would take a minute to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from infra.weights.bits import bits_of
from infra.weights.digest import model_digests
from infra.weights.eight_bits import EIGHT_BITS
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engine_form import EngineForm
from producers.engines.eight_bit_linear import rounded_weight
from producers.engines.remote import RemoteEngine
from tests.bench._gpu_model import sized_model
from tests.factories import make_spec
from tests.gpu.gpu_engines import SLOTS, give, gpu_engine, request, run, same
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sized_model(tmp_path_factory.mktemp("model"), "tiny", "cpu")


@pytest.fixture(scope="module", params=sorted(EIGHT_BITS))
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[RemoteEngine]:
    """One computes with graphs, the other without: graphs take long to make."""
    eager, loss = request.param == "int8", {"correction": "truncated", "correct_fresh": True}
    said = {"quantization": request.param, "options": {"enforce_eager": eager}, "speculation": True}
    with gpu_engine(model, generator=said, loss=loss) as made:
        form = EngineForm(model, make_spec(generator={"quantization": request.param}, loss=loss).generator)
        plain = ModelFolder(model).bits()
        rounded, digests = form.rounded(plain, model_digests(plain))
        give(made, PatchFile({}, rounded, since=None, root="0"), form.held(rounded, digests))
        yield made


@pytest.mark.parametrize("kind", sorted(EIGHT_BITS))
def test_a_gpu_rounds_to_the_bits_that_generators_expect(kind: str) -> None:
    weight = torch.randn(300, 257).mul(0.02).bfloat16()
    codes, scales = EIGHT_BITS[kind].rounded(bits_of(weight))
    there, by = rounded_weight(weight.cuda(), kind)
    assert codes.data.tobytes() == there.cpu().view(torch.uint8).numpy().tobytes()
    assert scales.data.tobytes() == by.cpu().numpy().tobytes()


def test_a_sample_has_the_same_bits_in_any_batch(engine: RemoteEngine) -> None:
    requests = [request(number, 60) for number in range(40)]
    together = run(engine, requests)
    for others in (requests[::-1], *([requests[number]] for number in (0, 13, 39))):
        for name, one in run(engine, others).items():
            same(one, together[name])


def test_guesses_change_no_bit(engine: RemoteEngine) -> None:
    """All samples have one prompt and one seed, so the first answer is what others guess, and rightly."""
    alike = [replace(request(0, 300), id=f"7{number:06d}-00") for number in range(SLOTS)]
    (first,) = run(engine, alike[:1]).values()

    def guessed() -> bool:
        for one in (*run(engine, alike[:1]).values(), *run(engine, alike).values()):
            same(one, first)
        return engine.pace().accepted > 0

    wait_until(guessed, what="a guess that is right")
