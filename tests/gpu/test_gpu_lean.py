"""Training in less memory on a GPU: moments in main memory, an adapter beside weights in 16 and 4 bits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.learners import forward, learner
from consumers.learners.learner import TorchLearner
from flows.checkpoints.quantizing import quantize_model
from infra.weights.four_bits import exactly, rounded
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.training import train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), width=512)


def trained(folder: Path, spec: RunSpec) -> tuple[Any, float]:
    """What three steps come to, and the most GPU memory that they took, in MB."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one = TorchLearner(str(folder), spec)
    norms = train(one, spec, 3)
    return (norms, one.made().root), (torch.cuda.max_memory_allocated() - before) / 1e6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_in_main_memory(model: Path, dtype: str) -> None:
    (bits, plain), (same, less) = (
        trained(model, make_spec(model={"dtype": dtype}, trainer={"offload_optimizer": offloaded}))
        for offloaded in (False, True)
    )
    assert bits == same
    assert less < 0.85 * plain


def test_an_adapter_beside_weights_in_few_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded_model = quantize_model(model, tmp_path / "nf4").folder
    spec = make_spec(model={"dtype": "bfloat16", "lora": {"rank": 4}})
    found = {folder: trained(folder, spec) for folder in (model, rounded_model)}

    def whole(folder: str, spec: RunSpec, device: torch.device) -> Any:
        return forward.load_policy(folder, spec, device).requires_grad_(False)

    monkeypatch.setattr(learner, "load_frozen", whole)
    for folder, (bits, memory) in found.items():
        same, more = trained(folder, spec)
        assert bits == same
        assert memory < 0.75 * more
    assert found[rounded_model][1] < 0.75 * found[model][1]


def test_four_bits_are_made_whole_as_on_a_cpu() -> None:
    weight = 0.02 * torch.randn(1000, 777, generator=torch.Generator().manual_seed(0))
    here, there = rounded(weight), rounded(weight.cuda())
    assert torch.equal(here.whole(), there.whole().cpu())
    assert exactly(there.whole()) is not None
    assert exactly(weight.cuda()) is None
