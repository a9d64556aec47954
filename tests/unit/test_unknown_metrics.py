"""Where no group has a gradient nobody knows the entropy: it is left out, and no reader takes that for 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from flows.cli import app
from flows.monitoring.run_figures import run_figures
from flows.page.curve_charts import points_of
from flows.view.curves import draw
from flows.view.live import picture
from flows.view.metric_rows import step_row, with_rates
from flows.view.run_view import RunView
from infra import runs
from schemas.messages import Sample
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World

ALIKE = 1  # the step whose rewards do not differ


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run whose second step has no gradient."""
    model = str(make_tiny_model(tmp_path / "model", layers=1, width=16))
    algorithm = {"iterations": 3, "groups": 2, "group_size": 2, "learning_rate": 1e-2}
    spec = make_spec(algorithm=algorithm, trainer={"checkpoint_every": 1, "keep_checkpoints": 3})
    context = make_context(spec, tmp_path / "run")
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    made = World(context, model)

    def edit(sample: Sample) -> Sample:
        return structs.replace(sample, reward=0.5) if sample.group // 2 == ALIKE else sample

    made.edit = edit
    made.live()
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    monkeypatch.setattr("flows.run.archive_query.connect", lambda record, name: context.bus)
    return made


def rows_in_json(world: World, *words: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, [*words, "--json", "--store", world.context.store.url])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_ledger_and_those_who_read_it(world: World, tmp_path: Path) -> None:
    ledger = world.ledger()
    assert ["entropy" in one.metrics for one in ledger] == [True, False, True]
    assert all(one.metrics["entropy"] > 0 for one in ledger if one.step != ALIKE)
    rows = with_rates([step_row(one) for one in ledger])
    assert [step for step, _ in points_of(rows, "entropy")] == [0, 2]
    draw(rows, [], tmp_path / "none.jsonl", tmp_path / "curves.png")
    view = RunView("test-1", world.context.spec)
    for one in ledger:
        view.take(one)
        picture(view)
        assert any("entropy" in figure.name for figure in run_figures(view, 0.0)) == (one.step != ALIKE)


def test_sql_and_bisect_and_the_difference_of_runs(world: World) -> None:
    said = rows_in_json(
        world, "sql", "test-1", "select step, metrics['entropy'] as entropy from steps order by 1"
    )
    assert [one["entropy"] is None for one in said] == [False, True, False]
    assert rows_in_json(world, "bisect", "test-1", "--when", "entropy >= 0")[0]["step"] == 0
    found = CliRunner().invoke(
        app, ["bisect", "test-1", "--when", "entropy == 0", "--store", world.context.store.url]
    )
    assert "holds for none of the 3 steps" in found.output
    said = rows_in_json(world, "inspect", "test-1", "--against", "test-1")
    assert ["entropy" in one for one in said] == [True, False, True]


def test_a_what_if(world: World) -> None:
    words = ("what-if", "test-1", "--from", "0", "--set", "algorithm.learning_rate=0.02")
    for curve in rows_in_json(world, *words)[0]["curves"]:
        assert [one["entropy"] is None for one in curve["points"]] == [False, True, False]
