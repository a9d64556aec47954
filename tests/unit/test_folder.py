"""A model's folder: what of it travels, and that nothing leads out of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.checkpoints.push_and_pull import pull_version
from flows.cli import app
from infra.stores.opening import open_store
from infra.weights import folder as folders
from infra.weights.folder import ModelFolder, is_beside, opened
from infra.weights.versions import WeightStore
from infra.weights.weights_error import WeightsError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    found = tmp_path / "model"
    found.mkdir()
    save_file({"w": torch.ones(4)}, found / "model.safetensors")
    (found / "config.json").write_text("{}")
    return found


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "tokenizer.model.v3", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json",
        "qwen.tiktoken",
        "added_tokens.json", "chat_template.json", "chat_template.jinja", "preprocessor_config.json",
        "adapter_config.json", "README.md", "LICENSE", "LICENSE.txt", "spiece.model", "tekken.json",
        "video_preprocessor_config.json", "quantize_config.json",
    ],
)  # fmt: skip
def test_what_weights_need_travels(name: str) -> None:
    assert is_beside(name)


@pytest.mark.parametrize(
    "name",
    [
        "id_rsa", ".env", "modeling_mine.py", "run.sh", "optimizer.pt", "training_args.bin", "weights.json",
        "model.safetensors", "model.safetensors.index.json", "credentials.json", "../config.json",
        "x/config.json",
        "config.json\n", "CONFIG.JSON", "pytorch_model.bin.index.json", "notes.txt", "secrets.md", "",
    ],
)  # fmt: skip
def test_nothing_else_does(name: str) -> None:
    assert not is_beside(name)


def test_what_is_left_out_is_named_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for name in ("id_rsa", "run.sh", ".netrc"):
        (folder / name).write_text("mine alone")
    for _ in range(3):
        assert set(ModelFolder(folder).beside) == {"config.json"}
    assert caplog.text.count("left out: .netrc, id_rsa, run.sh") == 1


def test_what_is_too_large_for_a_config_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_BESIDE", 10)
    (folder / "vocab.txt").write_text("x" * 11)
    assert set(ModelFolder(folder).beside) == {"config.json"}


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../other/model.safetensors", "a/b.safetensors", "..", "", 7, "a\0b", "a\\b"]
)
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(WeightsError, match=r"names .* which is no plain name of a file in it"):
        opened(folder).bits()


@pytest.mark.parametrize(
    "raw", ["[" * 100_000, "[]", "{}", '{"weight_map": []}', '{"weight_map": {"w": ["x"]}}', "\udcff"]
)
def test_an_index_that_is_none_is_said(folder: Path, raw: str) -> None:
    (folder / "model.safetensors.index.json").write_bytes(raw.encode(errors="surrogateescape"))
    with pytest.raises(WeightsError, match=r"index\.json is damaged"):
        opened(folder).bits()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "model.safetensors.index.json"])
def test_links_that_lead_out_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(WeightsError, match=rf"{name} leads out of the folder, to {tmp_path}/secret"):
        WeightStore(open_store(f"file://{tmp_path}/s"), "r-1").publish_model(
            0, opened(folder).bits(), files=opened(folder).beside
        )


def test_links_within_and_those_of_hugging_face_s_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "vocab.json").symlink_to("config.json")
    assert set(ModelFolder(folder).beside) == {"config.json", "vocab.json"}
    snapshot, blobs = tmp_path / "models--mine/snapshots/00ff", tmp_path / "models--mine/blobs"
    for place in (snapshot, blobs):
        place.mkdir(parents=True)
    for number, file in enumerate(("model.safetensors", "config.json")):
        (blobs / str(number)).write_bytes((folder / file).read_bytes())
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    for there in (snapshot, tmp_path / "link"):
        assert ModelFolder(there).root == ModelFolder(folder).root
        assert set(ModelFolder(there).beside) == {"config.json"}


def test_a_version_writes_nothing_but_what_travels(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its publisher put there."""
    weights = WeightStore(open_store(f"file://{tmp_path}/s"), "r-1")
    files = {"config.json": b"{}", "modeling_mine.py": b"import os", "weights.json": b"{}", "x.sh": b"rm"}
    weights.publish_model(0, ModelFolder(folder).bits(), files=files)
    pull_version(weights, 0, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "weights.json",
    }  # fmt: skip
    assert "left out: modeling_mine.py, weights.json, x.sh" in caplog.text


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("No space left on device")])
def test_a_first_pull_that_is_cut_off_can_be_repeated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, there: bool
) -> None:
    weights, out = WeightStore(open_store(f"file://{tmp_path}/s"), "r-1"), tmp_path / "out"
    weights.publish_model(0, ModelFolder(folder).bits(), files=ModelFolder(folder).beside)
    if there:
        out.mkdir()
    written = Path.write_bytes

    def cut_off(path: Path, data: bytes) -> int:
        if path.name == ".model.safetensors.tmp":
            written(path, data[:9])
            raise error
        return written(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", cut_off)
        with pytest.raises((KeyboardInterrupt, WeightsError)):
            pull_version(weights, 0, out)
    assert list(out.iterdir()) == []
    (out / ".model.safetensors.tmp").write_bytes(b"of a process that was killed")
    pull_version(weights, 0, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "weights.json"}
    assert ModelFolder(out).root == ModelFolder(folder).root


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["weights", *map(str, words)], env={"COLUMNS": "300"})
    assert result.exit_code == code, result.output
    return result.output


def test_going_back_has_to_be_asked_for(folder: Path, tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/s/mine", tmp_path / "out"
    for value in range(4):
        save_file({"w": torch.full((4,), float(value))}, folder / "model.safetensors")
        run("push", folder, url)
    run("pull", url, out)
    for version in (2, 3):
        (tmp_path / f"s/mine/v{version:06d}/manifest.json").unlink()
    for command, target in (("pull", out), ("pull", tmp_path / "fresh"), ("promote", tmp_path / "whole")):
        said = run(command, url, target, code=1)
        assert "version 1 as its newest, and version 3 was verified on this machine" in said
        assert "--version N, or say --allow-older" in said
    assert json.loads((out / "weights.json").read_text())["version"] == 3
    run("pull", url, out, "--version", 0)
    assert "version 3 was verified" in run("pull", url, out, code=1), "once asked for is not for ever"
    run("pull", url, out, "--allow-older")
    run("pull", url, out)
    assert json.loads((out / "weights.json").read_text())["version"] == 1


def test_a_folder_remembers_by_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, out = f"file://{tmp_path}/s/mine", tmp_path / "out"
    for _ in range(2):
        run("push", folder, url)
    run("pull", url, out)
    (tmp_path / "s/mine/v000001/manifest.json").unlink()
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "another home"))
    assert "and the folder holds version 1" in run("pull", url, out, code=1)
