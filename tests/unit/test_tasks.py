"""A user's problems, wherever they come from."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from producers.tasks import TaskError, load_problems, load_reward
from schemas.runspec import RunSpec, TaskSection
from tests.factories import make_spec

ROWS = [{"id": "a", "prompt": "1+1=", "answer": "2"}, {"id": "b", "prompt": "1+2=", "answer": "3"}]


def spec_with(**task: Any) -> RunSpec:
    section = TaskSection(**{"reward": "math:floor", **task})
    return make_spec().model_copy(update={"task": section})


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_jsonl_has_a_file_for_each_split(tmp_path: Path) -> None:
    spec = spec_with(
        jsonl=write_jsonl(tmp_path / "train.jsonl", ROWS[:1]),
        held_out_jsonl=write_jsonl(tmp_path / "held.jsonl", ROWS[1:]),
    )
    assert load_problems(spec, "train") == ROWS[:1]
    assert load_problems(spec, "held_out") == ROWS[1:]


@pytest.mark.parametrize("splits", [True, False])
def test_a_saved_dataset(tmp_path: Path, splits: bool) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    saved = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict({"train": saved}) if splits else saved).save_to_disk(folder)
    assert load_problems(spec_with(dataset=str(folder)), "train") == ROWS


def test_a_dataset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", ROWS)
    assert load_problems(spec_with(dataset=str(folder)), "train") == ROWS


def test_a_dataset_without_the_split_says_so(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(TaskError, match="saved, split held_out: KeyError"):
        load_problems(spec_with(dataset=str(tmp_path / "saved")), "held_out")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"id": "a"}], "problem 0 has no text in 'prompt'"),
        ([ROWS[0], ROWS[0]], "two problems of split 'train' have the id 'a'"),
        ([], "no problems in split 'train'"),
    ],
)
def test_problems_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_problems(spec_with(jsonl=write_jsonl(tmp_path / "task.jsonl", rows)), "train")


def test_a_problem_must_be_json(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "when?", "answer": date(2026, 1, 1)}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(TaskError, match="problem 0 has a value that JSON does not have"):
        load_problems(spec_with(dataset=str(tmp_path / "saved")), "train")


def test_other_field_names_and_no_id(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "task.jsonl", [{"question": "1+1=", "answer": "2"}])
    (problem,) = load_problems(spec_with(jsonl=path, prompt_field="question"), "train")
    assert (problem["prompt"], problem["answer"]) == ("1+1=", "2")
    assert len(problem["id"]) == 16


def test_a_reward_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def right(problem, completion):\n    return 1.0\n")
    assert load_reward(TaskSection(jsonl="x", reward=f"{tmp_path}/scores.py:right"))({}, "") == 1.0
    with pytest.raises(TaskError, match="has no function wrong"):
        load_reward(TaskSection(jsonl="x", reward=f"{tmp_path}/scores.py:wrong"))
