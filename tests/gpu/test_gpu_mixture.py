"""A mixture of experts on a GPU, with graphs: bits, weights in place, and routes that a learner follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from infra.weights.digest import model_digests
from infra.weights.folder import ModelFolder
from infra.weights.patch import PatchFile
from producers.engines.remote import RemoteEngine
from schemas.expert_routes import pack_routes
from tests.factories import make_sample, make_spec, make_tiny_mixture
from tests.gpu.gpu_engines import changed, give, give_first, gpu_engine, request, run, same


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mixture(
        tmp_path_factory.mktemp("model"), "qwen3_moe", vocab_size=512, hidden_size=128, head_dim=64,
        moe_intermediate_size=64, max_position_embeddings=1024, dtype="bfloat16",
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    with gpu_engine(model, generator={}) as made:
        give_first(made, ModelFolder(model).bits())
        yield made


def test_a_sample_has_the_same_bits_and_routes_in_any_batch(engine: RemoteEngine) -> None:
    requests = [request(number, 20 + 13 * number % 150) for number in range(40)]
    together = run(engine, requests)
    for others in (requests[::-1], requests[7:8]):
        for name, one in run(engine, others).items():
            same(one, together[name])
            np.testing.assert_array_equal(one.routes, together[name].routes)


def test_a_learner_follows_the_routes_of_samples(engine: RemoteEngine, model: Path) -> None:
    spec = make_spec(
        model={"dtype": "bfloat16"}, sampling={"max_tokens": 64, "max_prompt_tokens": 32},
        trainer={"microbatch_tokens": 4096},
    )  # fmt: skip
    requests = [request(number, 64) for number in range(16)]
    answers, learner, rows = run(engine, requests), TorchLearner(str(model), spec), []
    for one in requests:
        answer = answers[one.id]
        assert answer.routes is not None and answer.routes.shape[1:] == (2, 2)
        sample = make_sample(
            spec, 0, 0, prompt_tokens=np.array(one.prompt, np.int32), tokens=answer.tokens,
            logprobs=answer.logprobs, routes=pack_routes(answer.routes),
        )  # fmt: skip
        rows.append(TrainingRow(sample, 0, 0))
    batch = micro_batch(rows, None, learner.loss, 0).to(torch.device("cuda"))
    with torch.no_grad():
        logprobs = learner._forward.logprobs(learner._model, batch)
    gaps = (logprobs.float() - batch.behaviour).abs()
    assert gaps.mean() < 0.03 and gaps.max() < 0.5


def test_weights_of_experts_change_in_place(engine: RemoteEngine, model: Path) -> None:
    old = ModelFolder(model).bits()
    experts = {name: one for name, one in old.items() if ".experts." in name}
    new, requests = {**old, **changed(experts, 0.02, 1)}, [request(number, 60) for number in range(6)]
    before = run(engine, requests)
    give(engine, PatchFile(old, new, since="0", root="1"), model_digests(new))
    after = run(engine, requests)
    assert all((after[name].logprobs != one.logprobs).any() for name, one in before.items())
    give(engine, PatchFile(new, old, since="1", root="2"), model_digests(old))
    for name, one in run(engine, requests).items():
        same(one, before[name])
