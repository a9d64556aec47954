"""A user's problems, wherever they come from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producers.problems import LARGEST_PROBLEM
from producers.tasks import TaskError, load_problems, load_reward
from producers.tokenizing import TokenizerError, load_tokenize
from schemas.runspec import RunSpec, TaskSection
from tests.factories import make_spec

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
JSON = (
    st.fixed_dictionaries({}, optional={"id": VALUES, "prompt": VALUES | st.text(), "answer": VALUES})
    | VALUES
)
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
    with pytest.raises(TaskError, match="saved, split held_out: there is no such split; it has train"):
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "\xff"}', r"task.jsonl:2: it is not UTF-8 text: found the byte 0xff, the 13th"),
        (b"[" * 100_000, r"task.jsonl:2: not JSON: RecursionError"),
        (b'{"prompt": "1", "answer": NaN}', r"task.jsonl:2: not JSON: .*NaN is no JSON"),
        (b'{"prompt": "1", "answer": -Infinity}', r"task.jsonl:2: not JSON: .*-Infinity is no JSON"),
        (b'{"prompt": "1", "answer": 1e999}', r"task.jsonl:2: not JSON: .*'1e999' is too large"),
        (b'{"prompt": "1", "answer": ' + b"9" * 9_999 + b"}", r"task.jsonl:2: not JSON: ValueError"),
        (
            b'{"prompt": "' + b"x" * LARGEST_PROBLEM + b'"}',
            r"task.jsonl:2: a line of more than 4,194,304 bytes",
        ),
        (b'{"prompt": "' + "é".encode() * 3_000_000 + b'"}', r"task.jsonl:2: a line of more than"),
        (b'{"id": "b", "prompt": "\\ud800"}', r"problem 1 has text .* lone surrogate U\+D800; its id is 'b'"),
        (b'{"id": "b", "prompt": "1", "answer": "\\ud800"}', r"problem 1 has text .*U\+D800; its id is 'b'"),
        (b'{"id": "b", "prompt": "a\\u0000"}', r"problem 1 has the character U\+0000 in 'prompt'.*id is 'b'"),
        (b'{"id": "b\\u0000", "prompt": "a"}', r"problem 1 has the character U\+0000 in 'id'"),
        (b'{"id": "b", "prompt": 3}', r"problem 1 has no text in 'prompt' .*; a int is there; its id is 'b'"),
        (b'{"id": ["b"], "prompt": "1"}', r"problem 1 has a list for an id; text or a number"),
        (b'{"id": true, "prompt": "1"}', r"problem 1 has a bool for an id"),
        (b'{"id": "", "prompt": "1"}', r"problem 1 has an id of 0 characters; 1 to 256"),
        (b'{"id": "' + b"i" * 300 + b'", "prompt": "1"}', r"problem 1 has an id of 300 characters"),
        (b'{"id": "a", "prompt": "1"}', r"split 'train' have the id 'a': problems 0 and 1 .*ids must differ"),
        (b'{"prompt": "1", "deep": ' + b"[" * 100 + b"]" * 100 + b"}", r"problem 1 has more than 64 levels"),
        (b'"text"', r"problem 1 is a str; a dict is expected"),
        (b"null", r"problem 1 is a NoneType; a dict is expected"),
        (b"{", r"task.jsonl:2: not JSON"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "task.jsonl").write_bytes(b'{"id": "a", "prompt": "0"}\n' + line + b"\n")
    with pytest.raises(TaskError, match=message) as caught:
        load_problems(spec_with(jsonl=str(tmp_path / "task.jsonl")), "train")
    assert len(str(caught.value)) < 1_500


@settings(max_examples=300, deadline=5_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.one_of(st.binary(max_size=40), JSON.map(json.dumps).map(str.encode)), max_size=4))
def test_any_file_is_problems_or_an_explained_error(lines: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "task.jsonl").write_bytes(b"\n".join(lines))
    try:
        problems = load_problems(spec_with(jsonl=str(tmp_path / "task.jsonl")), "train")
    except TaskError as error:
        assert len(str(error)) < 1_500
    else:
        assert len({problem["id"] for problem in problems}) == len(problems)
        assert all(problem["prompt"].encode() for problem in problems)


def test_files_that_are_no_jsonl(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nowhere", "."):
        with pytest.raises(TaskError, match="there is no such file"):
            load_problems(spec_with(jsonl=str(tmp_path / name)), "train")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "can't be imported: SystemExit: 3"),
        ("import nothing_of_the_kind", "can't be imported: ModuleNotFoundError"),
        ("def problems(split): raise SystemExit(0)", r"problems\('train'\) failed: SystemExit: 0"),
        ("def problems(split): return 3", r"problems\('train'\) failed: TypeError"),
        ("problems = 3", r"has no function problems\(split\)"),
        (
            "def problems(split): yield {'prompt': 'x', 'y': float('nan')}",
            "a value that JSON does not have",
        ),
        (
            "def problems(split):\n  d = {'prompt': 'x'}; d['d'] = d; yield d",
            "JSON does not have: .*Circular",
        ),
        ("def problems(split): yield {'prompt': 'x', 'y': 'z' * (4 << 20)}", "at most 4,194,304 are allowed"),
    ],
)
def test_python_tasks_that_cannot_be_used(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(f"{code}\n")
    with pytest.raises(TaskError, match=message):
        load_problems(spec_with(python=str(tmp_path / "broken.py"), reward=None), "train")


def test_one_prompt_with_several_answers(tmp_path: Path) -> None:
    """The first keeps the id that runs before have recorded; the others are told apart by a number."""
    rows = [{"prompt": "1+1=", "answer": answer} for answer in ("2", "10", "2")]
    names = [
        problem["id"]
        for problem in load_problems(spec_with(jsonl=write_jsonl(tmp_path / "task.jsonl", rows)), "train")
    ]
    first = hashlib.blake2b(b"1+1=", digest_size=8).hexdigest()
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_a_source_that_is_cut_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "task.jsonl", ROWS)
    with caplog.at_level(logging.WARNING, "streamrl"):
        assert load_problems(spec_with(jsonl=path, limit=2), "train") == ROWS
        assert not caplog.records
        assert load_problems(spec_with(jsonl=path, limit=1), "train") == ROWS[:1]
    assert "more than 1 problems in split 'train'; the others are left out (task.limit)" in caplog.text


def test_a_tokenizer_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer.json: there is no tokenizer that can be read"):
        load_tokenize(str(tmp_path))


def test_other_field_names_and_no_id(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "task.jsonl", [{"question": "1+1=", "answer": "2"}])
    (problem,) = load_problems(spec_with(jsonl=path, prompt_field="question"), "train")
    assert (problem["prompt"], problem["answer"]) == ("1+1=", "2")
    assert len(problem["id"]) == 16


@pytest.mark.timeout(60)  # by names that are looked for from the first one on, it would take four minutes
def test_many_problems_may_share_a_prompt(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "number": number} for number in range(60_000)]
    found = load_problems(spec_with(jsonl=write_jsonl(tmp_path / "train.jsonl", rows)), "train")
    first = found[0]["id"]
    assert [one["id"] for one in found[1:]] == [f"{first}-{number}" for number in range(2, 60_001)]


def test_a_reward_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def right(problem, completion):\n    return 1.0\n")
    assert load_reward(TaskSection(jsonl="x", reward=f"{tmp_path}/scores.py:right"))({}, "") == 1.0
    with pytest.raises(TaskError, match="has no function wrong"):
        load_reward(TaskSection(jsonl="x", reward=f"{tmp_path}/scores.py:wrong"))
