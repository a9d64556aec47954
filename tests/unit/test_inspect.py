"""streamrl inspect: the samples of a step, one of them token by token, and the difference of two runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from msgspec import structs
from typer.testing import CliRunner

from flows.cli import app
from flows.run.run_difference import differences
from infra import runs
from infra.run_handle import RunHandle
from schemas.messages import Sample, StepRecord
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World

ALGORITHM = {"iterations": 4, "groups": 2, "group_size": 2, "learning_rate": 1e-2}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "200")
    model = str(make_tiny_model(tmp_path / "m", layers=1, width=16))
    spec = make_spec(algorithm=ALGORITHM, loss={"kind": "grpo", "kl": 0.1})
    context = make_context(spec, tmp_path)
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    world = World(context, model)

    def edit(sample: Sample) -> Sample:
        texts = "<b>&" if sample.group == 4 else "p"
        return structs.replace(sample, problem_id=texts)

    world.edit = edit
    world.live()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    return world


def asked(world: World, *words: str) -> str:
    result = CliRunner().invoke(app, ["inspect", "test-1", "--store", world.context.store.url, *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_samples_of_a_step_with_their_marks(world: World) -> None:
    rows = [json.loads(line) for line in asked(world, "--step", "2", "--sort", "gap", "--json").splitlines()]
    record = world.ledger()[2]
    assert [row["gap"] for row in rows] == sorted(record.gaps.astype(float).tolist(), reverse=True)
    assert {row["id"] for row in rows} == {"0000004-00", "0000004-01", "0000005-00", "0000005-01"}
    assert {row["step"] for row in rows} == {2} and all(row["advantage"] for row in rows)
    assert "0000004-01" in asked(world, "--step", "2") and "gap" in asked(world)
    few = asked(world, "--step", "2", "--where", "id=0000004-01", "--json").splitlines()
    assert len(few) == 1


def test_one_sample_token_by_token(world: World, tmp_path: Path) -> None:
    said = json.loads(asked(world, "--sample", "0000004-01", "--json"))
    record = world.ledger()[2]
    row = next(n for n in range(4) if (record.groups[n], record.indexes[n]) == (4, 1))
    tokens = said["tokens"]
    assert len(tokens) == record.lengths[row] and said["step"] == 2
    assert np.mean([one["trainer_logprob"] for one in tokens]) == pytest.approx(
        record.logprobs[row], abs=1e-4
    )
    gaps = [abs(one["trainer_logprob"] - one["logprob"]) for one in tokens]
    assert max(gaps) == pytest.approx(record.gaps[row], abs=1e-4)
    for one in tokens:
        assert one["ratio"] == pytest.approx(math.exp(one["trainer_logprob"] - one["logprob"]))
        assert one["advantage"] == pytest.approx(record.advantages[row], abs=1e-6)
        assert one["reference_logprob"] is not None and one["version"] == 2
    page = tmp_path / "sample.html"
    asked(world, "--sample", "0000004-01", "--page", str(page))
    html = page.read_text()
    assert html.count("<span style") == len(tokens) and "&lt;b&gt;&amp;" in html and "<b>&" not in html


def test_what_is_not_there_is_said(world: World) -> None:
    for words, why in (
        (["--sample", "0000999-00"], "no step of run test-1 has trained sample 0000999-00"),
        (["--sample", "nonsense"], "is no sample's id"),
        (["--step", "9"], "ends with step 3: it has no step 9"),
        (["--sort", "gpa"], "samples have no field"), (["--page", "x.html"], "name it with --sample"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["inspect", "test-1", "--store", world.context.store.url, *words])
        assert result.exit_code and why in result.output.replace("\n", "")


def test_the_difference_of_two_runs(world: World) -> None:
    rows = [json.loads(line) for line in asked(world, "--against", "test-1", "--json").splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["same_weights"] and row["same_samples"] and not row["first_other_stage"] for row in rows)
    assert "same_weights" in asked(world, "--against", "test-1")


def test_a_run_whose_ledger_begins_later_is_compared_from_there_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers: dict[str, list[StepRecord]] = {"run": world.ledger(), "fork": world.ledger()[2:]}
    monkeypatch.setattr("flows.run.run_difference.steps_in_ledger", lambda handle: iter(ledgers[handle]))
    for first, second in (("run", "fork"), ("fork", "run")):
        rows = differences(cast(RunHandle, first), cast(RunHandle, second))
        assert [row["step"] for row in rows] == [2, 3], f"{first} against {second}"


def test_figures_that_are_no_numbers_leave_json_as_it_should_be(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = [structs.replace(one, metrics={**one.metrics, "grad_norm": math.nan}) for one in world.ledger()]
    monkeypatch.setattr("flows.run.run_difference.steps_in_ledger", lambda handle: iter(spoilt))

    def refuse(found: str) -> None:
        raise AssertionError(f"{found} is not JSON")

    lines = asked(world, "--against", "test-1", "--json").splitlines()
    assert [json.loads(line, parse_constant=refuse)["grad_norm"] for line in lines] == [[None, None]] * 4
