"""`streamrl weights`: versions of anyone's checkpoints, put, fetched, compared and audited."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flows.cli import app
from infra.weights.digest import root_digest
from infra.weights.folder import ModelFolder
from infra.weights.places import weights_at
from tests.factories import make_tiny_model

RUNNER = CliRunner()


def run(*words: object, code: int = 0) -> str:
    result = RUNNER.invoke(app, ["weights", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model in bf16, and the same a little further on; the second one in two files."""
    folder = tmp_path_factory.mktemp("steps")
    one, other = folder / "one", folder / "other"
    shutil.copytree(make_tiny_model(folder / "model"), one)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(one / "model.safetensors").items()}
    save_file(tensors, one / "model.safetensors")
    shutil.copytree(one, other)
    (other / "model.safetensors").unlink()
    draw, places = torch.Generator().manual_seed(0), {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        moved = {}
        for name in names:
            where = torch.rand(tensors[name].shape, generator=draw) < 0.02
            moved[name] = (tensors[name].view(torch.int16) + where.short()).view(torch.bfloat16)
            places[name] = f"model-{number}.safetensors"
        save_file(moved, other / f"model-{number}.safetensors")
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return [one, other]


def test_only_what_changed_is_sent_and_fetched(steps: list[Path], tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/models/mine", tmp_path / "out"
    assert "version 0 is in" in run("push", steps[0], url)
    assert "sent as what changed of version 0" in run("push", steps[1], url, "--old", steps[0])
    assert "every bit verified" in run("pull", url, out, "--version", 0)
    assert ModelFolder(out).root == ModelFolder(steps[0]).root
    run("pull", url, out)
    assert ModelFolder(out).root == ModelFolder(steps[1]).root
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (steps[1] / name).read_bytes()
    sizes = [path.size for version in (0, 1) for path in weights_at(url).manifest(version).paths]
    assert sizes[1] < 0.1 * sizes[0]
    assert run("ls", url).count("kB") >= 3
    assert "from version 0" in run("show", url)
    assert "2 versions, all whole" in run("verify", url)
    assert "0.00%" in run("diff", f"{url}@1", out)
    assert "2.0" in run("diff", steps[0] / "model.safetensors", steps[1])


def test_a_folder_that_was_changed_is_mended(steps: list[Path], tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/mine", tmp_path / "out"
    run("push", steps[0], url)
    run("push", steps[1], url, "--old", steps[0])
    run("pull", url, out, "--version", 0)
    file = out / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    run("pull", url, out)
    assert ModelFolder(out).root == ModelFolder(steps[1]).root


def test_what_is_wrong_is_said(steps: list[Path], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/mine"
    assert "has no versions of weights" in run("ls", url, code=2)
    assert "is no folder of weights: a URL is expected" in run("ls", "file://mine", code=1)
    assert "there is no run mine in" in run("ls", "mine", code=2)
    run("push", steps[0], url)
    assert "has no version 3; it has 0 (older" in run("pull", url, tmp_path / "x", "--version", 3, code=1)
    assert "does not hold version 0" in run("push", steps[1], url, "--old", steps[1], code=1)
    assert "is not empty, and holds no pulled version" in run("pull", url, steps[0], code=1)
    assert "has no model.safetensors" in run("push", tmp_path, url, code=1)
    assert "can't be read as a safetensors file" in run("diff", steps[0] / "config.json", steps[0], code=1)
    run("push", steps[1], url, "--old", steps[0])
    manifest = weights_at(url).manifest(1)
    chunk = tmp_path / "store" / weights_at(url).chunk_key(manifest.paths[0].chunks[0])
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    assert f"{chunk.name} is damaged" in run("verify", url, code=1)
    chunk.unlink()
    assert f"{chunk.name} is not there" in run("verify", url, code=1)
    chunk.write_bytes(whole)
    file = tmp_path / "store" / weights_at(url).manifest_key(1)
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"previous": "00"}))
    assert "was not made from the version 0 that is here" in run("verify", url, code=1)
    file.write_text(json.dumps(said | {"root": "00"}))
    assert "its root is not that of its tensors" in run("verify", url, code=1)
    name = min(said["tensors"])
    others = said["tensors"] | {name: said["tensors"][name] | {"digest": "00"}}
    root = root_digest({name: tensor["digest"] for name, tensor in others.items()})
    file.write_text(json.dumps(said | {"tensors": others, "root": root}))
    assert "from version 0: this path makes other bits than the version has" in run("verify", url, code=1)


@pytest.mark.parametrize("at", [1e17, 1e300, -1e12, -1.0, 253402300799.0])
def test_a_time_of_no_calendar_is_shown_as_it_is(at: float, steps: list[Path], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mine"
    run("push", steps[0], url)
    file = tmp_path / weights_at(url).manifest_key(0)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"created_at": at}))
    shown = run("ls", url) + run("show", url)
    assert abs(at) < 1e12 or shown.count(f"at Unix time {at:g}") == 2


def test_a_folder_that_was_changed_is_mended_by_its_own_version(steps: list[Path], tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/mine", tmp_path / "out"
    run("push", steps[0], url)
    run("pull", url, out)
    file, whole = out / "model.safetensors", (out / "model.safetensors").read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    run("pull", url, out)
    assert file.read_bytes() == whole


def test_a_folder_that_names_an_impossible_version_is_pulled_anew(steps: list[Path], tmp_path: Path) -> None:
    url, out = f"file://{tmp_path}/mine", tmp_path / "out"
    run("push", steps[0], url)
    run("pull", url, out)
    (out / "weights.json").write_text('{"run": "mine", "version": 1e999, "root": "x"}')
    run("pull", url, out)
    assert json.loads((out / "weights.json").read_text())["version"] == 0
