"""`streamrl sql` and `streamrl archive`: a table for people, JSON and CSV for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra import runs
from infra.roles.context import RoleContext
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleContext:
    context = make_context(make_spec(), tmp_path)
    runs.create(
        context.store, context.spec, bootstrap_servers="none", model="m", topics=set(), run_id=context.run
    )
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: context.bus)
    monkeypatch.setattr("flows.run.archiving.connect", lambda record, name: context.bus)
    monkeypatch.setattr("flows.run.archive_query.connect", lambda record, name: context.bus)
    monkeypatch.setenv("COLUMNS", "200")
    for group in range(5):
        failed = {"reward_error": "[red]", "reward": float("nan")} if group else {}
        sample = make_sample(context.spec, group, 0, **failed)
        context.writer.send(context.topics.samples, encode(sample), key=sample.id, partition=group % 2)
    return context


def call(context: RoleContext, *words: str) -> str:
    found = CliRunner().invoke(app, [*words, "--store", context.store.url])
    assert found.exit_code == 0, found.output
    return found.output


def test_rows_are_shown_as_a_table_and_printed_as_json_and_csv(context: RoleContext) -> None:
    fields = '"group" as g, reward, versions, reward_parts, reward_error'
    sql = f"select {fields} from samples order by 1 desc limit 1"
    assert "[red]" in call(context, "sql", context.run, sql)
    assert json.loads(call(context, "sql", context.run, sql, "--json")) == {
        "g": 4, "reward": None, "versions": [1], "reward_parts": {}, "reward_error": "[red]",
    }  # fmt: skip
    assert call(context, "sql", context.run, sql, "--csv").splitlines()[0].startswith("g,reward,versions")


def test_columns_of_the_same_name_are_all_kept(context: RoleContext) -> None:
    sql = "select 1 as step, 2 as step, 3 as step_2, 4 as step"
    names = {"step": 1, "step_3": 2, "step_2": 3, "step_4": 4}
    assert json.loads(call(context, "sql", context.run, sql, "--json")) == names
    assert call(context, "sql", context.run, sql, "--csv").splitlines() == [",".join(names), "1,2,3,4"]
    assert [name in call(context, "sql", context.run, sql) for name in names] == [True] * 4


def test_an_archived_run_gives_the_same_answer(context: RoleContext) -> None:
    sql = 'select count(*) as n, sum("group") as s from samples'
    assert json.loads(call(context, "archive", context.run, "--json"))["records"] == 5
    assert "nothing came" in call(context, "archive", context.run)
    assert json.loads(call(context, "sql", context.run, sql, "--json")) == {"n": 5, "s": 10}


def test_what_is_wrong_is_said_in_a_line(context: RoleContext) -> None:
    for words in (("sql", "no-1", "select 1"), ("sql", context.run, "drop table x"), ("archive", "no-1")):
        found = CliRunner().invoke(app, [*words, "--store", context.store.url])
        assert found.exit_code in (2, 3) and "Traceback" not in found.output
