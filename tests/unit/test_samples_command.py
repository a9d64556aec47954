"""streamrl samples: which samples, in which order, and texts that a terminal can bear."""

from __future__ import annotations

import json
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.explain.reward_faults import MissingRewards
from flows.run.suggested_commands import SuggestedCommands
from flows.view.sample_rows import BadCondition, SampleCondition, in_order, sample_row
from infra.roles.context import RoleContext
from infra.runs import RunRecord
from schemas.messages import Sample
from schemas.wire import encode
from tests.factories import make_context, make_model_files, make_sample, make_spec
from tests.feeding import make_step

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleContext:
    """A run with two steps on a bus in memory."""
    make_model_files(tmp_path / "model")
    context = make_context(SPEC, tmp_path)
    context.store.put("runs/test-1/run.json", context.record.model_dump_json().encode())
    for iteration in range(2):
        samples, places = [], []
        for group in range(4 * iteration, 4 * iteration + 4):
            for index in range(2):
                sample = make_sample(
                    SPEC, group, index, reward=group + index / 10, reward_parts={"word": index / 2},
                    finish="length" if index else "stop", tokens=np.array([1, 2, 11], np.int32), length=3,
                    reward_error="ZeroDivisionError: no \x1b[31mred" if group == 7 else "",
                )  # fmt: skip
                partition = sample.length_class
                places.append((partition, len(context.bus.log(context.topics.samples)[partition])))  # type: ignore[attr-defined]
                context.writer.send(
                    context.topics.samples, encode(sample), key=sample.id, partition=partition
                )
                samples.append(sample)
        step = make_step(SPEC, iteration, samples, places=places)
        context.writer.send(context.topics.ledger, encode(step), key=str(iteration))
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    return context


def say(run: RoleContext, *words: str) -> str:
    result = CliRunner().invoke(app, ["samples", "test-1", "--store", run.store.url, *words])
    assert result.exit_code == 0, result.output
    return result.output


def rows(run: RoleContext, *words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in say(run, "--json", *words).splitlines()]


def test_the_newest_step_is_shown_with_texts_and_rewards(run: RoleContext) -> None:
    said = say(run)
    assert "0000004-00  reward 4 (word 0)  length 3 (expected 3)  version 1  ended by stop" in said
    assert "\n3 4\n0 1 +\n" in said, "prompt and answer are text"
    assert "no reward: ZeroDivisionError: no \\x1b[31mred" in said and "\x1b" not in said
    assert "more" not in said


def test_a_step_can_be_chosen_sorted_and_narrowed_down(run: RoleContext) -> None:
    assert [row["id"] for row in rows(run, "--step", "0", "--sort", "reward")][:2] == [
        "0000003-01",
        "0000003-00",
    ]
    assert [row["id"] for row in rows(run, "--step", "0", "--sort", "reward", "--lowest", "-n", "1")] == [
        "0000000-00"
    ]
    few = rows(run, "--where", "reward>=5", "--where", "finish=length", "--where", "text~1 +")
    assert [row["id"] for row in few] == ["0000005-01", "0000006-01"], "group 7 has no reward"
    assert few[0]["prompt"] == "3 4" and few[0]["parts"] == {"word": 0.5} and few[0]["versions"] == [1]
    assert [row["group"] for row in rows(run, "--where", "word=0.5", "--sort", "group")] == [7, 6, 5, 4]
    said = say(run, "--step", "0", "-n", "3")
    assert "5 more; -n 8 shows all" in said
    assert "no sample meets the conditions" in say(run, "--where", "length>100")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "9"], "run test-1 has no step 9 yet: its newest is 1"),
        (["--where", "reward"], "'reward' is no condition: write a field, one of <= >= "),
        (
            ["--where", "colour=red"],
            "samples have no field 'colour'; their fields are id, problem, iteration",
        ),
        (["--where", "reward<low"], "reward<low: reward is a number, and 'low' is none"),
        (["--sort", "parts"], "samples can't be sorted by parts: it is no number and no text"),
        (["--follow", "--sort", "reward"], "--sort can't be used with --follow"),
    ],
)
def test_errors_say_what_is_possible(run: RoleContext, words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["samples", "test-1", "--store", run.store.url, *words])
    assert result.exit_code in (1, 2) and message in result.stderr and "Traceback" not in result.output


def test_a_run_without_a_step_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context(SPEC, tmp_path)
    context.store.put("runs/test-1/run.json", context.record.model_dump_json().encode())
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    result = CliRunner().invoke(app, ["samples", "test-1", "--store", context.store.url])
    assert result.exit_code == 1 and "has trained no step yet; --follow shows samples" in result.stderr


def test_follow_shows_samples_as_they_come(run: RoleContext) -> None:
    """Samples that were there before are not shown; Ctrl-C ends it."""

    def live() -> None:
        new = make_sample(SPEC, 9, 1, tokens=np.array([5], np.int32), length=1)
        run.writer.send(run.topics.samples, encode(new), key=new.id, partition=0)
        threading.Timer(1.5, lambda: signal.raise_signal(signal.SIGINT)).start()

    threading.Timer(1.0, live).start()
    result = CliRunner().invoke(app, ["samples", "test-1", "--store", run.store.url, "--follow", "--json"])
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["0000009-01"]


def followed(run: RoleContext, where: str, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    """What `--follow` warns of, when three samples come."""
    come = [make_sample(SPEC, 9, index, **fields) for index in range(3)]
    monkeypatch.setattr("flows.run.reading.OpenRun.new_samples", lambda self: iter(come))
    words = ["samples", "test-1", "--store", run.store.url, "--follow", "--json", "--where", where]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.parametrize("trained", [True, False])
def test_following_says_once_that_a_name_is_unknown(
    run: RoleContext, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    if not trained:
        monkeypatch.setattr("flows.run.reading.OpenRun.newest_step", lambda self: None)
    said = followed(run, "colour=red", monkeypatch, reward_parts={"late": 1.0})
    assert said.count("samples have no field 'colour'; their fields are id, problem") == 1
    assert "text, word. Nothing is shown unless" in said if trained else "text, late. Nothing" in said
    known = ("finish=stop", "word=1") if trained else ("finish=stop", "late=1")
    assert [followed(run, one, monkeypatch, reward_parts={"late": 1.0}) for one in known] == ["", ""]
    if not trained:
        assert followed(run, "late=1", monkeypatch, reward_error="x") == "", (
            "without a reward nothing is known"
        )


def test_rows_that_lack_a_field_come_last() -> None:
    made = [
        sample_row(make_sample(SPEC, 0, index, reward_error="x" if index else ""), str) for index in (1, 0)
    ]
    assert [row["index"] for row in in_order(made, "reward", lowest_first=False)] == [0, 1]
    assert [row["index"] for row in in_order(made, "reward", lowest_first=True)] == [0, 1]


@pytest.mark.parametrize("text", ["", "=", "a b=3", "reward", "<3"])
def test_a_text_that_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(BadCondition, match="is no condition"):
        SampleCondition.read(text)


def test_a_record_of_another_run_is_not_shown(run: RoleContext, tmp_path: Path) -> None:
    other = RunRecord.model_validate({**json.loads(run.record.model_dump_json()), "id": "test-2"})
    run.store.put("runs/test-2/run.json", other.model_dump_json().encode())
    result = CliRunner().invoke(app, ["samples", "test-2", "--store", run.store.url])
    assert result.exit_code == 1


def test_following_ends_with_as_many_as_were_asked_for(
    run: RoleContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(self: object) -> Iterator[Sample]:
        yield from (make_sample(SPEC, 0, index, tokens=np.array([1], np.int32)) for index in range(2))
        raise AssertionError("it waits for a sample that nobody asked for")

    monkeypatch.setattr("flows.run.reading.OpenRun.new_samples", endless)
    for more in ([], ["--json"]):
        assert "0000000-01" in say(run, "--follow", "-n", "2", *more)


def test_the_samples_that_explain_points_at_are_those_without_a_reward(run: RoleContext) -> None:
    step = SimpleNamespace(step=1, failed="0000007-00", failed_reason="ZeroDivisionError: no red",
                           metric=lambda name: 2.0)  # fmt: skip
    evidence: Any = SimpleNamespace(steps=[step], command=SuggestedCommands("test-1", run.store.url).command)
    (found,) = MissingRewards().look(evidence)
    result = CliRunner().invoke(app, [*shlex.split(found.command)[1:], "--json"])
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["0000007-00", "0000007-01"]
