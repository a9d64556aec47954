"""Things that a user meets first: init, the home, and names of weights."""

from __future__ import annotations

import random
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.run.locations import named_store
from flows.run.series_url import series_url
from infra.stack.paths import StackPaths
from infra.weights.weights_error import WeightsError
from schemas.loading import load_run_file
from tests.factories import make_context, make_spec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("STREAMRL_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_init_writes_a_run_that_is_fine(folder: Path, chat: list[str]) -> None:
    done = CliRunner().invoke(app, ["init", "mine", *chat])
    assert done.exit_code == 0 and "streamrl run mine/run.yaml --check" in done.output
    assert sorted(file.name for file in (folder / "mine").iterdir()) == ["model.py", "run.yaml", "task.py"]
    spec = load_run_file(folder / "mine" / "run.yaml")
    assert spec.task.python == str(folder / "mine" / "task.py")
    assert ("messages" in (folder / "mine" / "task.py").read_text()) == bool(chat)
    model = runpy.run_path(str(folder / "mine" / "model.py"))
    prompt, _ = next(model["demonstrations"](model["make_tokenizer"](), random.Random(0)))
    assert len(prompt) <= spec.sampling.max_prompt_tokens, "no prompt would be used"


def test_what_init_says_can_be_copied_from_any_folder(folder: Path) -> None:
    done = CliRunner().invoke(app, ["init", "my runs[old]"])
    commands = [line.partition("  train")[0] for line in done.output.splitlines() if "streamrl run" in line]
    assert shlex.split(commands[-1]) == ["streamrl", "run", "my runs[old]/run.yaml"]
    assert "my runs[old]/task.py" in done.output


def test_init_replaces_nothing_unless_it_is_told_to(folder: Path) -> None:
    (folder / "task.py").write_text("mine")
    done = CliRunner().invoke(app, ["init"])
    assert done.exit_code == 2 and f"{folder} has task.py already: choose another folder" in done.output
    assert (folder / "task.py").read_text() == "mine" and not (folder / "run.yaml").exists()
    assert CliRunner().invoke(app, ["init", "--force"]).exit_code == 0
    assert "def reward" in (folder / "task.py").read_text()


def test_init_says_why_it_can_not_write(folder: Path) -> None:
    (folder / "file").write_text("")
    done = CliRunner().invoke(app, ["init", "file/mine"])
    assert done.exit_code == 2 and "can't be written" in done.output and "Traceback" not in done.output


def test_the_home_is_found_upward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(folder / "a" / "b")
    assert StackPaths.locate().home == folder / "a" / "b" / ".streamrl", "there is none yet"
    (folder / ".streamrl").mkdir()
    assert StackPaths.locate().home == folder / ".streamrl"
    assert f"their home: {folder}/.streamrl" in CliRunner().invoke(app, ["status"]).output
    (folder / "a" / ".streamrl").mkdir()
    assert StackPaths.locate().home == folder / "a" / ".streamrl", "the nearest one"
    monkeypatch.setenv("STREAMRL_HOME", "other")
    assert StackPaths.locate().home == folder / "a" / "b" / "other"


def test_a_report_is_beside_the_run_file_if_that_says_so(folder: Path) -> None:
    CliRunner().invoke(app, ["init", "mine"])
    runfile = folder / "mine" / "run.yaml"
    assert load_run_file(runfile).report == "runs", "in the folder where the run is started"
    assert load_run_file(runfile, ["report=out"]).report == str(folder / "mine" / "out")
    assert load_run_file(runfile, ["report=/else/where"]).report == "/else/where"


def test_weights_are_named_by_run_path_or_url(folder: Path) -> None:
    (folder / ".streamrl").mkdir()
    record = make_context(make_spec(), folder).record
    named_store("local").put("runs/test-1/run.json", record.model_dump_json().encode())
    assert series_url("test-1") == f"file://{folder}/.streamrl/store/runs/test-1/weights"
    assert series_url("./mine") == f"file://{folder}/mine"
    assert series_url("/models/mine") == "file:///models/mine"
    assert series_url("s3://bucket/mine") == "s3://bucket/mine"
    with pytest.raises(WeightsError, match=r"there is no run mine in .*; the newest there: test-1\. A"):
        series_url("mine")
    done = CliRunner().invoke(app, ["weights", "ls", "mine"])
    assert done.exit_code == 2 and "there is no run mine" in done.output
    done = CliRunner().invoke(app, ["weights", "ls", "test-1"])
    assert f"{folder}/.streamrl/store/runs/test-1/weights has no versions of weights" in done.output


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://", "'s3://': s3:// needs the name of a bucket"),
        ("file://", "'file://': file:// needs an absolute path"),
        ("s3:/bucket", "'s3:/bucket' is no URL"),
        ("foo://x", "'foo://x': 'foo' is no kind of store that fsspec knows"),
    ],
)
def test_a_url_that_names_no_store_is_refused_rather_than_empty(url: str, said: str) -> None:
    done = CliRunner().invoke(app, ["runs", "--store", url])
    assert done.exit_code == 1 and f"store {said}" in done.stderr and "there are no runs" not in done.output
