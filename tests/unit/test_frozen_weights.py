"""Models that are not trained take less memory in a bf16 run, and every bit stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from consumers.learners import critic, forward, learner
from consumers.learners.held_linear import HeldLinear
from consumers.learners.learner import TorchLearner
from flows.checkpoints.quantizing import quantize_model
from flows.cli import app
from infra.weights.folder import ModelFolder
from infra.weights.four_bits import exactly
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.training import rows_of, train


@pytest.fixture(scope="module", params=["16 bits", "4 bits"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    if request.param == "16 bits":
        return str(folder)
    return str(quantize_model(folder, tmp_path_factory.mktemp("model") / "nf4").folder)


def whole(folder: str, spec: RunSpec, device: torch.device) -> Any:
    return forward.load_policy(folder, spec, device).requires_grad_(False)


@pytest.mark.parametrize(
    "case", [{}, {"trainer": {"gradient_checkpointing": True}}, {"loss": {"kind": "ppo"}}]
)
def test_an_adapter_learns_the_same_bits(
    model: str, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(**{"model": {"dtype": "bfloat16", "lora": {"rank": 4}}, **case})
    found = []
    for way in ("held", "whole"):
        if way == "whole":
            monkeypatch.setattr(learner, "load_frozen", whole)
            monkeypatch.setattr(critic, "load_frozen", whole)
        one = TorchLearner(model, spec)
        held = [layer for layer in one._model.modules() if isinstance(layer, HeldLinear)]
        assert len(held) == (14 if way == "held" else 0)
        if way == "held":
            in_four = [layer.codes is not None for layer in held]
            assert all(in_four) or not any(in_four)
            assert all(in_four) == (exactly(held[0].weight) is not None)
        found.append((train(one, spec, 3), one.made().root))
    assert found[0] == found[1]


def test_a_reference_says_the_same(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(model={"dtype": "bfloat16"}, loss={"kl": 0.1})
    said = []
    for _ in range(2):
        one = TorchLearner(model, spec)
        assert not any(parameter.requires_grad for parameter in one._reference.parameters())
        (scored,) = one.score([rows_of(spec)], one.loss.needs)
        said.append([row.scores.reference.tobytes() for row in scored])  # type: ignore[union-attr]
        monkeypatch.setattr(learner, "load_frozen", whole)
    assert said[0] == said[1]


def test_held_weights_take_less_memory(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", width=320)
    quantize_model(folder, tmp_path / "nf4")

    def size(path: Path, dtype: str) -> int:
        one = TorchLearner(str(path), make_spec(model={"dtype": dtype, "lora": {"rank": 4}}))
        layers = [layer for layer in one._model.modules() if isinstance(layer, torch.nn.Linear)]
        frozen = [layer for layer in layers if layer is not one._model.lm_head]
        return sum(
            tensor.nbytes for layer in frozen for tensor in (*layer.parameters(), *layer.buffers())
            if (not tensor.requires_grad and tensor.dim() == 2) or isinstance(layer, HeldLinear)
        )  # fmt: skip

    plain, half, four = size(folder, "float32"), size(folder, "bfloat16"), size(tmp_path / "nf4", "bfloat16")
    assert 0.5 <= half / plain < 0.51
    assert 0.13 <= four / plain < 0.15


def test_a_model_whose_tensors_have_other_names_is_read_whole(tmp_path: Path) -> None:
    """An older name in the files: transformers knows it, and reading tensors one by one does not."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path / "model")
    tensors = load_file(str(folder / "model.safetensors"))
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, str(folder / "model.safetensors"), metadata={"format": "pt"})
    one = TorchLearner(str(folder), make_spec(model={"dtype": "bfloat16", "lora": {"rank": 4}}))
    assert not any(isinstance(layer, HeldLinear) for layer in one._model.modules())


def test_the_command_rounds_a_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    done = CliRunner().invoke(app, ["quantize", str(folder), str(tmp_path / "nf4")])
    assert done.exit_code == 0, done.output
    assert "14 linear layers" in done.output
    before, after = ModelFolder(folder), ModelFolder(tmp_path / "nf4")
    assert before.names == after.names
    for name in after.names:
        tensor = after.tensor(name)
        assert tensor.dtype == torch.bfloat16
        is_linear = "proj" in name and name.endswith("weight")
        if is_linear:
            assert exactly(tensor) is not None
            assert exactly(before.tensor(name)) is None
        else:
            assert torch.equal(tensor, before.tensor(name).bfloat16())
    read = AutoModelForCausalLM.from_pretrained(str(tmp_path / "nf4"), dtype="auto")
    assert read.dtype == torch.bfloat16
    assert (tmp_path / "nf4" / "tokenizer.json").is_file()


def test_the_command_says_why_it_can_not(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "config.json").unlink()
    for words, said in (
        ([str(bare), str(tmp_path / "new")], "can't make a model of its config.json"),
        ([str(folder), str(folder)], "is there and not empty"),
        ([str(tmp_path / "none"), str(tmp_path / "new")], "has no model.safetensors"),
    ):
        done = CliRunner().invoke(app, ["quantize", *words])
        assert done.exit_code == 1
        assert said in " ".join(done.output.split())
    assert not (tmp_path / "new").exists()
