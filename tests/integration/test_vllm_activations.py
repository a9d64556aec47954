"""A sample has the same bits beside others with each kind of activation, on one thread and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C import get_num_threads, set_num_threads
from vllm.distributed import cleanup_dist_env_and_memory

from producers.engines.engine import SampleRequest
from producers.engines.vllm_in_process import VllmEngine
from tests.engine_draws import check_begins, run
from tests.factories import make_tiny_kind

PROMPT = 333  # rows of 200 elements: threads part this prompt within a row
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},  # silu
    "gemma": {"head_dim": 32},  # gelu by tanh, times a gate
    "starcoder2": {},  # gelu by tanh, in a layer of transformers
    "qwen2_moe": {  # silu in experts, and a sigmoid for each token
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 200,
        "shared_expert_intermediate_size": 200,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All models: vLLM changes classes of transformers, with which none can be built by itself any more."""
    folder, common = (
        tmp_path_factory.mktemp("models"),
        {"intermediate_size": 200, "max_position_embeddings": 512},
    )
    return {kind: make_tiny_kind(folder / kind, kind, **{**common, **more}) for kind, more in KINDS.items()}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[VllmEngine]:
    yield VllmEngine(str(models[request.param]), slots=24, max_model_len=PROMPT + 1, kv_cache_mib=64)
    cleanup_dist_env_and_memory()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = get_num_threads()
    set_num_threads(request.param)
    yield request.param
    set_num_threads(before)


def test_bits_do_not_depend_on_other_rows(engine: VllmEngine, threads: int) -> None:
    """Looks at what the last layer makes of each token: it shows more than a sample's log-probabilities."""
    noise = np.random.default_rng(0)
    requests = [
        SampleRequest(f"{n:07d}-00", noise.integers(2, 24, length).tolist(), 1, n, 1.0, endless=True)
        for n, length in enumerate([*range(1, 20), PROMPT, PROMPT - 1])
    ]
    made: list[torch.Tensor] = []
    hook = engine._runner.model.register_forward_hook(
        lambda model, inputs, hidden: made.append(hidden.clone())
    )
    alone = [run(engine, [one])[one.id] for one in requests]
    rows = torch.cat([hidden[: len(one.prompt)] for hidden, one in zip(made, requests, strict=True)])
    made.clear()
    check_begins(run(engine, requests), alone)
    hook.remove()
    assert torch.equal(made[0][: len(rows)], rows)
    assert get_num_threads() == threads
