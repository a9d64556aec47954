"""A fork of a real run, with all real parts: it draws the same samples, and ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.bus import read_all
from infra.runs import find
from schemas.messages import StepRecord
from schemas.topics import Topics
from schemas.wire import decode
from tests.factories import make_spec
from tests.harness import running


@pytest.mark.thorough
def test_a_fork_draws_what_its_run_drew_and_ends_with_its_bits(
    tmp_path: Path, kafka: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    spec = make_spec(
        algorithm={"iterations": 4, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
        trainer={"bundle_tokens": 64, "checkpoint_every": 1}, model={"path": str(tiny_model)},
        placement={"kafka": {"bootstrap_servers": kafka}}, report=str(tmp_path / "runs"),
    )  # fmt: skip
    with running(tmp_path / "parent", kafka, spec, tiny_model) as parent:
        parent.wait_for_end()
        steps, store = parent.steps(), parent.store.url
    file = tmp_path / "fork.yaml"
    words = ["fork", parent.record.id, "--at", "2", "--store", store, "-o", str(file), "--name", "other"]
    result = CliRunner().invoke(app, [*words, "--start", "--no-prefect"])
    assert result.exit_code == 0, result.output
    assert "other bits" not in result.output and "not kept" not in result.output
    record = find(parent.store, "other-1")
    assert record.fork is not None
    assert (record.fork.run, record.fork.step) == (parent.record.id, 2)
    topics = Topics("other-1", spec.lengths.classes)
    own = [decode(one.value, StepRecord) for one in read_all(parent.bus, topics.ledger, deadline_s=150)]
    assert [step.step for step in own] == [2, 3]
    for ours, theirs in zip(own, steps[2:], strict=True):
        assert ours.seeds_digest == theirs.seeds_digest
        assert sorted(ours.problem_ids) == sorted(theirs.problem_ids)  # bundles come in any order
        assert ours.root_out == theirs.root_out
    page = (tmp_path / "runs" / "other-1" / "report.html").read_text()
    assert f"fork of {parent.record.id} at step 2" in page
    assert f"other-1 (fork of {parent.record.id} at step 2)" in _printed("runs", "--store", store)
    assert f"a fork of {parent.record.id} at step 2" in _printed("status", "other-1", "--store", store)


def _printed(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output
