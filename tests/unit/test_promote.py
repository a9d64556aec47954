"""Versions of anybody's checkpoints as Hugging Face folders again: whole, in several files, adapters."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from flows.cli import app
from infra.runs import create
from infra.stores.opening import open_store
from infra.weights.adapter_tensors import lora_of
from infra.weights.folder import ModelFolder, opened
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from tests.factories import make_spec, make_tiny_model

TOKENS = torch.tensor([[4, 5, 6, 7, 8, 3, 2]])
RUNNER = CliRunner()


def run(*words: object, code: int = 0) -> str:
    result = RUNNER.invoke(app, ["weights", *map(str, words)], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.output


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits.float()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter"))


def make_adapter(model: Path, folder: Path, **options: Any) -> Path:
    """As peft saves one that has learned something."""
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, lora_alpha=6.0, **options)
    net = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    net.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(model).save_pretrained(str(folder))
    return folder


def split(model: Path, folder: Path) -> Path:
    """The same model in several files."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder, max_shard_size="60KB")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_comes_back_complete(model: Path, tmp_path: Path, shards: int) -> None:
    url, folder = f"file://{tmp_path}/mine", tmp_path / "out"
    run("push", model if shards == 1 else split(model, tmp_path / "split"), url)
    assert f'AutoModelForCausalLM.from_pretrained("{folder}")' in run("promote", url, folder)
    run("pull", url, tmp_path / "pulled")
    for found in (folder, tmp_path / "pulled"):
        assert ModelFolder(found).root == ModelFolder(model).root
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(found)),
                           logits(AutoModelForCausalLM.from_pretrained(model)))  # fmt: skip
        assert AutoTokenizer.from_pretrained(found).decode([4, 5]) == "23"
    assert "is there and not empty" in run("promote", url, folder, code=1)


def test_a_large_model_is_written_in_several_files(model: Path, tmp_path: Path) -> None:
    url, wide = f"file://{tmp_path}/mine", tmp_path / "wide"
    shutil.copytree(model, wide)
    tensors = load_file(model / "model.safetensors")
    tensors["unused"] = torch.zeros(700_000, dtype=torch.bfloat16)
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    run("push", wide, url)
    run("promote", url, tmp_path / "out", "--shard", "0.001")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert ModelFolder(tmp_path / "out").root == ModelFolder(wide).root


def test_config_and_tokenizer_may_be_the_base_s(model: Path, tmp_path: Path) -> None:
    url, bare = f"file://{tmp_path}/mine", tmp_path / "bare"
    bare.mkdir()
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, bare / "model.safetensors")
    run("push", bare, url)
    said = run("promote", url, tmp_path / "out", code=1)
    assert f"{url} has no config.json" in said and "began with (--base)" in said
    assert "no config.json" in run("promote", url, tmp_path / "out", "--base", tmp_path, code=1)
    assert not (tmp_path / "out").exists()
    run("promote", url, tmp_path / "out", "--base", model)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([4]) == "2"


def test_a_run_s_model_is_known(model: Path, tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    record = create(store, make_spec(), bootstrap_servers="none", model=str(model))
    weights = WeightStore(store, record.id)
    weights.publish(2, load_file(model / "model.safetensors"), trainer_epoch=0)
    url = f"{store.url}/runs/{record.id}/weights"
    run("promote", url, tmp_path / "out")
    assert ModelFolder(tmp_path / "out").root == ModelFolder(model).root
    assert f"{url} has no version 1; it has 2" in run("promote", url, tmp_path / "x", "--version", 1, code=1)
    assert "is a whole model: leave --adapter out" in run("promote", url, tmp_path / "x", "--adapter", code=1)
    (tmp_path / "store/runs" / record.id / "run.json").unlink()
    assert "has no config.json" in run("promote", url, tmp_path / "x", code=1)
    run("promote", url, tmp_path / "x", "--base", model)


def test_an_adapter_comes_back_alone_and_merged(model: Path, adapter: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mine"
    assert "version 0 is in" in run("push", adapter, url)  # its configuration names the base
    assert ModelFolder(model).root in run("show", url)
    plain = AutoModelForCausalLM.from_pretrained(model)
    without = logits(plain)
    expected = logits(PeftModel.from_pretrained(plain, str(adapter)))
    run("pull", url, tmp_path / "pulled")
    said = run("promote", url, tmp_path / "alone", "--adapter")
    assert "PeftModel.from_pretrained" in said
    for folder in (tmp_path / "pulled", tmp_path / "alone"):
        assert opened(folder).root == opened(adapter).root
        base = AutoModelForCausalLM.from_pretrained(model)
        assert torch.equal(logits(PeftModel.from_pretrained(base, str(folder))), expected)
    assert "the model that" in run("promote", url, tmp_path / "merged", code=1)
    run("promote", url, tmp_path / "merged", "--base", model)
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert float((found - expected).abs().max()) < 1e-4 < 0.1 < float((without - expected).abs().max())
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([4]) == "2"


def test_of_an_adapter_only_what_changed_is_sent(adapter: Path, tmp_path: Path) -> None:
    url, later = f"file://{tmp_path}/mine", tmp_path / "later"
    shutil.copytree(adapter, later)
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values())).view(torch.int32)[0, 0] += 1
    save_file(tensors, later / "adapter_model.safetensors")
    run("push", adapter, url)
    run("pull", url, tmp_path / "out")
    assert "as what changed of version 0" in run("push", later, url, "--old", adapter)
    run("pull", url, tmp_path / "out")
    assert opened(tmp_path / "out").root == opened(later).root
    assert "1 of 8 tensors differ" in run("diff", adapter, later)


def test_an_adapter_of_another_or_an_unknown_model_is_refused(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    url, lonely = f"file://{tmp_path}/mine", tmp_path / "lonely"
    shutil.copytree(adapter, lonely)
    config = json.loads((lonely / "adapter_config.json").read_text())
    (lonely / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "a/b"}))
    said = run("push", lonely, url, code=1)
    assert "holds an adapter: name the folder of the model that it is for with --base (it says a/b" in said
    assert "holds a whole model: leave --base out" in run("push", model, url, "--base", model, code=1)
    run("push", lonely, url, "--base", model)
    other = make_tiny_model(tmp_path / "other", seed=5)
    assert "is an adapter for a model with root" in run(
        "promote", url, tmp_path / "out", "--base", other, code=1
    )
    assert not (tmp_path / "out").exists()
    (lonely / "adapter_config.json").unlink()
    run("push", lonely, url, "--base", model)
    for flags in (["--adapter"], ["--base", model]):
        assert "there is no adapter_config.json of version 1" in run(
            "promote", url, tmp_path / "out", *flags, code=1
        )


def test_what_only_peft_can_merge_is_said(model: Path, tmp_path: Path) -> None:
    where = tmp_path / "rs"
    config = (make_adapter(model, where, use_rslora=True) / "adapter_config.json").read_bytes()
    assert lora_of(config, "it").scale == pytest.approx(6.0 / math.sqrt(4))
    run("push", where, f"file://{tmp_path}/rs-versions")
    run("promote", f"file://{tmp_path}/rs-versions", tmp_path / "out", "--base", model)
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(where)))
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert float((found - expected).abs().max()) < 1e-4
    said = json.loads(config)
    for change, why in (
        ({"use_dora": True}, "it has use_dora, which only peft merges"),
        ({"rank_pattern": {"q_proj": 8}}, "it has rank_pattern"),
        ({"bias": "all"}, "it has bias"),
        ({"peft_type": "IA3"}, "it is of kind IA3"),
        ({"r": None}, "it is no configuration of an adapter"),
        ({"r": math.inf}, "it is no configuration of an adapter"),
    ):
        with pytest.raises(WeightsError, match=why):
            lora_of(json.dumps({**said, **change}).encode(), "it")
    with pytest.raises(WeightsError, match="it is no configuration of an adapter"):
        lora_of(b"{", "it")


def test_layers_that_the_base_has_not_are_named(model: Path, adapter: Path, tmp_path: Path) -> None:
    url, odd = f"file://{tmp_path}/mine", tmp_path / "odd"
    shutil.copytree(adapter, odd)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for file, rename in (("layers.1", "layers.9"), (".lora_B.weight", ".lora_B.bias")):
        moved = {name.replace(file, rename): tensor for name, tensor in tensors.items()}
        save_file(moved, odd / "adapter_model.safetensors")
        run("push", odd, url)
    words = "promote", url, tmp_path / "x", "--base", model, "--version"
    assert "is for model.layers.9.mlp.up_proj, which the model in" in run(*words, 0, code=1)
    assert "not the tensors of an adapter" in run(*words, 1, code=1)
    assert not (tmp_path / "x").exists()


def test_a_damaged_config_is_named(model: Path, tmp_path: Path) -> None:
    url, odd = f"file://{tmp_path}/mine", tmp_path / "odd"
    shutil.copytree(model, odd)
    (odd / "config.json").write_text("{")
    run("push", odd, url)
    assert "config.json of the version, or of its base, is damaged" in run(
        "promote", url, tmp_path / "x", code=1
    )
    assert not (tmp_path / "x").exists()
