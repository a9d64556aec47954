"""Names on the Hugging Face Hub: from a cache, and without one a message that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.run.checks import problems_of
from flows.run.far_files import start_model_here
from flows.run.inspection import inspect_run
from flows.run.inspection.task import look_at_task
from flows.run.start_model import model_at_hand, prepare_model
from infra import hub
from infra.hub import HubError, is_hub_name
from infra.runs import RunRecord
from producers.tasks import TaskError, load_problems
from schemas.runspec import RunSpec, TaskSection
from tests.factories import TASK, make_model_files, make_spec

NAME = "someone/tiny-1.5"
ROWS = [{"id": str(n), "prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a Hub that does not answer."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "home" / "hub"


def in_cache(cache: Path, name: str, kind: str, files: Path) -> Path:
    """Put files where the Hub's libraries keep them: links to blobs, under a revision."""
    repo = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0123abcd")
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(files.iterdir())):
        (repo / "blobs" / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def spec_of(path: Any = NAME) -> RunSpec:
    Path("task.py").write_text(TASK)
    task = {"python": str(Path("task.py").resolve())}
    return make_spec(task=task, model={"path": str(path)})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAME, True), ("Qwen/Qwen2.5-0.5B-Instruct", True), ("nowhere", False), ("/data/model", False),
        ("./a/b", False), ("a/b/c", False), ("a/", False), ("here/mine", False), ("a b/c", False),
    ],
)  # fmt: skip
def test_which_texts_are_names(text: str, expected: bool) -> None:
    Path("here").mkdir()
    assert is_hub_name(text) is expected


def test_a_model_in_the_cache_is_a_folder_like_any_other(cache: Path, tmp_path: Path) -> None:
    snapshot = in_cache(cache, NAME, "model", make_model_files(tmp_path / "files"))
    spec = spec_of()
    assert problems_of(spec) == []
    assert model_at_hand(spec) == prepare_model(spec, lambda share, text: None) == snapshot
    said = [one.line for one in inspect_run(spec)]
    assert f"model: {snapshot} has a qwen2 of 1 tensors, and a tokenizer" in said


def test_a_folder_of_that_name_comes_before_the_hub(cache: Path, tmp_path: Path) -> None:
    in_cache(cache, NAME, "model", make_model_files(tmp_path / "files"))
    mine = make_model_files(tmp_path / NAME)
    assert prepare_model(spec_of(), lambda share, text: None) == mine


def asserts_advice(said: str, reason: str, cache: Path) -> None:
    assert f"there is no folder {NAME}" in said and str(cache) in said and reason in said
    for way in ("hf download someone/tiny-1.5", "HF_HOME", "copy the folder here and write its path"):
        assert way in said
    assert "\n" not in said and len(said) < 1_100


@pytest.mark.parametrize(("offline", "reason"), [("1", "HF_HUB_OFFLINE is set"), ("0", "onnect")])
def test_without_cache_and_network_a_start_says_what_to_do(
    cache: Path, offline: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    (said,) = problems_of(spec_of())
    assert said.startswith("model.path: ")
    asserts_advice(said, reason, cache)
    assert model_at_hand(spec_of()) is None


def test_a_model_that_is_in_the_cache_in_part_is_not_taken(cache: Path, tmp_path: Path) -> None:
    files = make_model_files(tmp_path / "files")
    (files / "model.safetensors").unlink()
    in_cache(cache, NAME, "model", files)
    (said,) = problems_of(spec_of())
    asserts_advice(said, "onnect", cache)
    assert "is not whole in the Hugging Face cache" in said


def test_the_network_may_fail_between_the_check_and_the_fetch(cache: Path) -> None:
    told: list[str] = []
    with pytest.raises(HubError) as caught:
        prepare_model(spec_of(), lambda share, text: told.append(text))
    asserts_advice(str(caught.value), "rror", cache)
    assert told == [f"fetching {NAME} from the Hugging Face Hub"]


def test_a_path_that_is_wrong_is_no_name() -> None:
    Path("models").mkdir()
    assert problems_of(spec_of("models/bse")) == ["model.path: there is no folder models/bse"]
    assert problems_of(spec_of("nowhere")) == ["model.path: there is no folder nowhere"]


def test_a_hub_that_has_it_is_asked_again_by_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *_, **__: None)
    assert problems_of(spec_of()) == []
    first = inspect_run(spec_of())[0]
    assert first.line == f"model: {NAME} is not here; a run fetches it from the Hub"


def task_of(**task: Any) -> RunSpec:
    section = TaskSection(dataset=NAME, reward="math:floor", **task)
    return make_spec().model_copy(update={"task": section})


def written(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


PROGRAM = """
import sys
from producers.tasks import load_problems
from schemas.runspec import RunSpec
spec = RunSpec.model_validate_json(sys.argv[1])
try:
    print(len(load_problems(spec, sys.argv[2])))
except Exception as error:
    print(type(error).__name__, error)
"""


def loaded(spec: RunSpec, split: str, **environment: str) -> str:
    """Load in a process of its own: the libraries read their environment when they are imported."""
    root = str(Path(hub.__file__).parents[1])
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, spec.model_dump_json(), split], env={**env, **environment},
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_dataset_in_the_cache(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    in_cache(cache, NAME, "dataset", written(tmp_path / "files", train=ROWS, test=ROWS[:3]))
    assert loaded(task_of(), "test", HF_HUB_OFFLINE="1") == "3"
    assert loaded(task_of(), "train[:50%]", HF_HUB_OFFLINE="1") == "5"


def test_a_hub_that_does_not_answer_is_done_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    load = datasets.load_dataset

    def unreachable(source: str, *given: Any, **named: Any) -> Any:
        if source == NAME:
            raise ConnectionError("Couldn't reach the Hub")  # after half a minute of attempts
        return load(source, *given, **named)

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(TaskError, match=r"there is no folder someone/tiny-1\.5, .*Couldn't reach the Hub"):
        load_problems(task_of(), "train")
    in_cache(cache, NAME, "dataset", written(tmp_path / "files", train=ROWS))
    assert len(load_problems(task_of(), "train")) == 10


def test_a_dataset_without_cache_and_network(cache: Path) -> None:
    pytest.importorskip("datasets")
    said = loaded(task_of(), "train", HF_HUB_OFFLINE="1")
    assert said.startswith(f"TaskError dataset {NAME}, split train: there is no folder")
    assert f"hf download {NAME} --repo-type dataset" in said and "\n" not in said


def test_a_check_reads_a_dataset_of_the_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (found,) = look_at_task(task_of(), None)
    assert found.wrong and f"hf download {NAME} --repo-type dataset" in found.said
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    (found,) = look_at_task(task_of(), None)
    assert not found.wrong
    in_cache(cache, NAME, "dataset", written(tmp_path / "files", train=ROWS))
    said = [one.line for one in look_at_task(task_of(), None)]
    assert said[0] == "task: the first 10 problems of split 'train' can be used"


def saved(folder: Path, split: str | None = None) -> TaskSection:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS, split=split)
    rows.save_to_disk(folder)
    return TaskSection(dataset=str(folder), reward="math:floor")


def rows_in(section: TaskSection, split: str, **changes: Any) -> list[str]:
    spec = make_spec().model_copy(update={"task": section.model_copy(update=changes)})
    return [problem["id"] for problem in load_problems(spec, split)]


def test_a_single_dataset_is_one_split(tmp_path: Path) -> None:
    section = saved(tmp_path / "one")
    assert len(rows_in(section, "train")) == 10
    with pytest.raises(TaskError, match=r"single dataset, .*'train'\. Save a DatasetDict .*'train\[:90%\]'"):
        rows_in(section, "held_out")
    test = saved(tmp_path / "two", split="test")
    assert len(rows_in(test, "test")) == 10
    with pytest.raises(TaskError, match="which stands for the split 'test'"):
        rows_in(test, "train")


def test_a_split_may_have_a_slice(tmp_path: Path) -> None:
    section = saved(tmp_path / "one")
    changes = {"train_split": "train[:80%]", "held_out_split": "train[80%:]"}
    assert rows_in(section, "train[:80%]", **changes) == [str(n) for n in range(8)]
    assert rows_in(section, "train[80%:]", **changes) == ["8", "9"]
    assert rows_in(section, "train[2:4]", **changes) == ["2", "3"]
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "dict")
    whole = TaskSection(dataset=str(tmp_path / "dict"), reward="math:floor")
    assert rows_in(whole, "train[-3:]") == ["7", "8", "9"]
    for wrong in ("train[", "train[a:b]", "train[:3]+train[5:]", "test[:3]"):
        with pytest.raises(TaskError, match="split "):
            rows_in(whole, wrong)


def test_the_configuration_of_a_dataset(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = written(tmp_path / "many", easy=ROWS[:2], hard=ROWS[2:])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: easy.jsonl\n- config_name: hard\n"
        "  data_files: hard.jsonl\n---\n"
    )
    section = TaskSection(dataset=str(folder), reward="math:floor")
    assert len(rows_in(section, "train", dataset_config="hard")) == 8
    assert len(rows_in(section, "train", dataset_config="easy")) == 2
    with pytest.raises(TaskError, match=r"Config name is missing|config"):
        rows_in(section, "train")
    with pytest.raises(TaskError, match=r"leave task\.dataset_config out"):
        rows_in(saved(tmp_path / "one"), "train", dataset_config="main")


def test_ranks_of_a_trainer_take_its_model_from_this_machines_cache(cache: Path, tmp_path: Path) -> None:
    snapshot = in_cache(cache, NAME, "model", make_model_files(tmp_path / "files"))
    there = RunRecord(
        id="r-1", spec=spec_of(), bootstrap_servers="kafka:9092", store="s3://b/runs", created_at=1.0,
        model="/far/snapshots/0123abcd",
    )  # fmt: skip
    assert start_model_here(there, None) == str(snapshot.resolve())
    assert start_model_here(there, str(tmp_path)) == str(tmp_path)
    for same in ({"model": str(snapshot)}, {"spec": spec_of(tmp_path)}):  # it is there, or not of the Hub
        assert start_model_here(there.model_copy(update=same), None) is None
    with pytest.raises(HubError, match="someone/other"):
        start_model_here(there.model_copy(update={"spec": spec_of("someone/other")}), None)
