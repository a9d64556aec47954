"""Versions of runs as Hugging Face folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from consumers.learners.learner import TorchLearner
from flows.checkpoints.export_run import export_run
from flows.checkpoints.promote import promote_version
from flows.checkpoints.version_source import ExportError, VersionSource
from flows.cli import app
from flows.run.report import export_model
from infra.runs import RunRecord, create
from infra.stores.opening import open_store
from infra.stores.store import Store
from infra.weights.digest import digests_of
from infra.weights.folder import ModelFolder
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError
from schemas.runspec import RunSpec
from tests.factories import TINY_MIXTURES, make_spec, make_tiny_mixture, make_tiny_model

TOKENS = torch.tensor([[4, 5, 6, 7, 8, 3, 2]])
LORA = {"rank": 4, "alpha": 6.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


class Made:
    """A run with versions 1 and 3."""

    def __init__(self, folder: Path, model: str, spec: RunSpec) -> None:
        self.store: Store = open_store(f"file://{folder}/store")
        self.record: RunRecord = create(self.store, spec, bootstrap_servers="none", model=model)
        self.learner = TorchLearner(model, spec)
        self.weights = WeightStore(self.store, self.record.id)
        for version in (1, 3):
            noise = torch.Generator().manual_seed(version)
            moved = {
                name: tensor.float() + 0.2 * torch.randn(tensor.shape, generator=noise)
                for name, tensor in self.learner.weights().items()
            }
            self.learner.adopt(moved)
            self.weights.publish(version, self.learner.weights(), trainer_epoch=0, base=self.learner.base)


Make = Callable[..., Made]


@pytest.fixture
def make(tmp_path: Path, model: str) -> Make:
    return lambda **section: Made(tmp_path, model, make_spec(model=section))


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits.float()  # type: ignore[operator]
    return found


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_the_merged_model_says_what_base_and_adapter_say(
    make: Make, model: str, tmp_path: Path, dtype: str, error: float
) -> None:
    made = make(lora=LORA, dtype=dtype)
    whole = export_run(made.record, made.store, tmp_path / "a" / "whole")
    adapter = export_run(made.record, made.store, tmp_path / "adapter", adapter=True)
    assert (whole.version, adapter.version) == (3, 3)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain = logits(base)
    expected = logits(PeftModel.from_pretrained(base, str(adapter.folder)))
    read = AutoModelForCausalLM.from_pretrained(whole.folder)
    assert read.dtype == getattr(torch, dtype)
    found = logits(read)
    assert float((found - expected).abs().max()) < error < float((plain - expected).abs().max())
    assert AutoTokenizer.from_pretrained(whole.folder).decode([4, 5]) == "23"
    tensors = load_file(str(whole.folder / "model.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert set(tensors) == set(ModelFolder(model).names)
    assert adapter.size < whole.size
    config = json.loads((adapter.folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6.0, model)
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert sorted(config["target_modules"]) == kinds
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_layers_that_share_a_name_with_others_are_named_in_full(
    make: Make, model: str, tmp_path: Path
) -> None:
    made = make(lora={**LORA, "targets": ["0.self_attn.q_proj"]})
    folder = export_run(made.record, made.store, tmp_path / "adapter", adapter=True).folder
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.q_proj"]
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder))
    assert sum("lora_A" in name for name, _ in net.named_parameters()) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_trains_all_weights(make: Make, tmp_path: Path, dtype: str) -> None:
    made = make(dtype=dtype)
    for version in (1, 3):
        folder = export_run(made.record, made.store, tmp_path / str(version), version=version).folder
        read = AutoModelForCausalLM.from_pretrained(folder)
        assert digests_of(dict(read.named_parameters())) == made.weights.manifest(version).digests
    with pytest.raises(
        ExportError, match=r"version 3 of run test-1 in file://.* is a whole model: leave --adapter out"
    ):
        export_run(made.record, made.store, tmp_path / "adapter", adapter=True)


@pytest.mark.parametrize("lora", [LORA, None])
def test_a_large_model_is_written_in_several_files(
    make: Make, tmp_path: Path, lora: dict[str, float] | None
) -> None:
    made = make(lora=lora)
    one = export_run(made.record, made.store, tmp_path / "one")
    told: list[float] = []
    many = promote_version(
        made.weights, VersionSource.of_run(made.record), 3, tmp_path / "many", shard=60_000,
        progress=lambda share, _: told.append(share),
    )  # fmt: skip
    files = sorted(path.name for path in many.folder.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((many.folder / name).stat().st_size < 70_000 for name in files)
    assert ModelFolder(many.folder).root == ModelFolder(one.folder).root
    index = json.loads((many.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in load_file(str(one.folder / "model.safetensors")).values()
    )
    read = [AutoModelForCausalLM.from_pretrained(each.folder) for each in (one, many)]
    assert torch.equal(logits(read[0]), logits(read[1]))
    assert told == sorted(told) and told[0] == 0.0 and told[-1] == 1.0 and len(told) > 20


def test_what_is_there_is_not_touched(make: Make, tmp_path: Path) -> None:
    made = make(lora=LORA)
    target = tmp_path / "full"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="full is there and not empty: name another folder, or remove it"):
        export_run(made.record, made.store, target)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    with pytest.raises(ExportError, match=r"mine\.txt is there and not empty"):
        export_run(made.record, made.store, target / "mine.txt")
    with pytest.raises(ExportError, match=r"can't be written"):
        export_run(made.record, made.store, target / "mine.txt" / "model")
    (target / "mine.txt").unlink()
    assert export_run(made.record, made.store, target).folder == target


def test_nothing_half_is_left(make: Make, tmp_path: Path) -> None:
    made = make(lora=LORA)

    def interrupt(share: float, text: str) -> None:
        if 0 < share < 1:
            raise KeyboardInterrupt

    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        export_run(made.record, made.store, tmp_path / "model", progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_nothing_is_written_of_what_is_damaged_or_of_another_base(
    make: Make, model: str, tmp_path: Path
) -> None:
    made = make(lora=LORA)
    other = make_tiny_model(tmp_path / "other", seed=5)
    record = made.record.model_copy(update={"model": str(other)})
    for adapter in (False, True):
        with pytest.raises(WeightsError, match="Put the model that the run began with there"):
            export_run(record, made.store, tmp_path / "model", adapter=adapter)
    gone = made.record.model_copy(update={"model": str(tmp_path / "gone")})
    with pytest.raises(
        ExportError, match=r"gone has no config\.json: name .* the model that run test-1 .* began with"
    ):
        export_run(gone, made.store, tmp_path / "model")
    file = tmp_path / "store" / made.weights.chunk_key(made.weights.manifest(3).paths[0].chunks[0])
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(WeightsError, match="is damaged: it has other bytes than its name says"):
        export_run(made.record, made.store, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_report_has_the_newest_model(make: Make, tmp_path: Path) -> None:
    made = make(lora=LORA)
    for _ in range(2):  # a report may be written again
        assert export_model(made.record, tmp_path / "model") == 3
    exported = export_run(made.record, made.store, tmp_path / "again")
    assert ModelFolder(tmp_path / "model").root == ModelFolder(exported.folder).root
    bare = create(made.store, made.record.spec, bootstrap_servers="none", model=made.record.model)
    assert export_model(bare, tmp_path / "none") is None


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def invoke(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["export", *words, "--store", f"file://{tmp_path}/store"])
        return result.exit_code, result.output

    return invoke


def test_the_command(make: Make, cli: Callable[..., tuple[int, str]], tmp_path: Path, model: str) -> None:
    made = make(lora=LORA)
    run = made.record.id
    code, said = cli(run, "--version", "1")
    assert code == 0 and "version 1 of test-1 is in test-1-v1 (" in said
    assert 'AutoModelForCausalLM.from_pretrained("test-1-v1")' in said
    code, said = cli(run, "--adapter")
    assert code == 0 and f'AutoModelForCausalLM.from_pretrained("{model}"), "test-1-v3-adapter")' in said
    assert (tmp_path / "test-1-v3-adapter" / "adapter_model.safetensors").is_file()
    code, said = cli(run, "--version", "2")
    assert code == 1 and "has no version 2; it has 1, 3 (older ones may have been collected)" in said
    code, said = cli(run, "--version", "1")
    assert code == 1 and "test-1-v1 is there and not empty" in said
    code, said = cli("test-9")
    assert code == 2 and "there is no run test-9 in file://" in said


@pytest.mark.parametrize("kind", TINY_MIXTURES)
def test_each_expert_of_a_mixture_has_its_own_tensors_in_a_folder(kind: str, tmp_path: Path) -> None:
    """As in the folder that the run began with, which other programs read as well."""
    model = make_tiny_mixture(tmp_path / "mixture", kind)
    made = Made(tmp_path, str(model), make_spec())
    exported = export_run(made.record, made.store, tmp_path / "exported").folder
    assert ModelFolder(exported).shapes == ModelFolder(model).shapes
    loaded = dict(AutoModelForCausalLM.from_pretrained(exported).named_parameters())
    trained = made.learner.weights()
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.items())
    again = TorchLearner(str(exported), make_spec())
    assert digests_of(again.weights()) == digests_of(trained)
