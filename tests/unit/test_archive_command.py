"""`streamrl archive` and `streamrl rm` with several runs: one that is broken does not stop the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.run.removing import Remains
from flows.run.request import RunFailed
from infra.archive.archive_writing import ArchivePass, ArchiveProgress
from infra.bus import NoBroker
from infra.runs import RunError
from infra.stores.store import Store


def test_the_others_are_archived(monkeypatch: pytest.MonkeyPatch) -> None:
    def archive(run: str, store: str, progress: ArchiveProgress) -> ArchivePass:
        if run == "gone-1":
            raise RunError("there is no run gone-1")
        if run == "away-1":
            raise NoBroker("Kafka at far:9092 can't be reached")
        return ArchivePass(7, 100, 10, 1, {})

    monkeypatch.setattr("flows.run.archiving.archive_now", archive)
    result = CliRunner().invoke(app, ["archive", "gone-1", "count-1", "away-1", "count-2", "--json"])
    assert [json.loads(line)["run"] for line in result.stdout.splitlines()] == ["count-1", "count-2"]
    assert result.exit_code == 2
    assert "there is no run gone-1" in result.stderr and "far:9092" in result.stderr


def test_the_others_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    removed = []

    def remains(store: Store, run: str, *_: object) -> Remains:
        if run == "count-1":
            raise RunFailed("run count-1 is going on: stop it first")
        return Remains(run, None, objects=["one"])

    monkeypatch.setattr("flows.run.removing.remains", remains)
    monkeypatch.setattr("flows.run.removing.remove", lambda store, found, *_, **__: removed.append(found.run))
    result = CliRunner().invoke(app, ["rm", "count-1", "count-2", "--yes"])
    assert removed == ["count-2"]
    assert result.exit_code == 1 and "is going on" in result.stderr
    assert CliRunner().invoke(app, ["rm", "count-3", "count-4"], input="n\n").exit_code == 2
    assert removed == ["count-2"]
