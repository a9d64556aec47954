"""Training in less memory on a GPU: moments in main memory, an adapter beside weights in 16 and 4 bits."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from consumers.learners import forward, learner
from consumers.learners.learner import TorchLearner
from consumers.learners.sharded_loading import linear_layers
from flows.checkpoints.quantizing import quantize_model
from infra.weights.folder import ModelFolder
from infra.weights.four_bits import exactly, rounded
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.training import train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), width=512)


def trained(folder: Path, spec: RunSpec) -> tuple[Any, int, int]:
    """What three steps come to; bytes of GPU memory that are held before them, and after them."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    one = TorchLearner(str(folder), spec)
    loaded = torch.cuda.memory_allocated() - before
    norms = train(one, spec, 3)
    return (norms, one.made().root), loaded, torch.cuda.memory_allocated() - before


def weights_of(folder: Path, layer: str = "") -> int:
    shapes = ModelFolder(folder).shapes
    return sum(math.prod(shape) for name, shape in shapes.items() if not layer or name == f"{layer}.weight")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moments_in_main_memory(model: Path, dtype: str) -> None:
    (bits, _, plain), (same, _, less) = (
        trained(model, make_spec(model={"dtype": dtype}, trainer={"offload_optimizer": offloaded}))
        for offloaded in (False, True)
    )
    assert bits == same
    assert plain - less > 7.9 * weights_of(model)


def test_an_adapter_beside_weights_in_few_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded_model = quantize_model(model, tmp_path / "nf4").folder
    spec = make_spec(model={"dtype": "bfloat16", "lora": {"rank": 4}})
    found = {folder: trained(folder, spec) for folder in (model, rounded_model)}
    linear = sum(weights_of(model, name) for name in linear_layers(str(model)))

    def whole(folder: str, spec: RunSpec, device: torch.device) -> Any:
        return forward.load_policy(folder, spec, device).requires_grad_(False)

    monkeypatch.setattr(learner, "load_frozen", whole)
    for folder, saved in ((model, 1.9), (rounded_model, 3.3)):  # bytes of a weight
        bits, loaded, _ = found[folder]
        same, more, _ = trained(folder, spec)
        assert bits == same
        assert more - loaded > saved * linear


def test_four_bits_are_made_whole_as_on_a_cpu() -> None:
    weight = 0.02 * torch.randn(1000, 777, generator=torch.Generator().manual_seed(0))
    here, there = rounded(weight), rounded(weight.cuda())
    assert torch.equal(here.whole(), there.whole().cpu())
    assert exactly(there.whole()) is not None
    assert exactly(weight.cuda()) is None
