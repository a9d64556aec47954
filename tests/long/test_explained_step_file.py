"""A step file tells the cause of a gap to the generators' log-probabilities, or the command that can."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.run import bundling, versions_beside
from infra.step_file.unpacking import open_step_file
from tests.factories import make_tiny_model
from tests.zoo.faults import FAULTS, Fault
from tests.zoo.world import ZooWorld, zoo_spec

_STEP = 8  # by then all of these faults have begun
_OLD = ("weights never delivered", "an older version served", "a stale tied head", "the KV cache not reset")
NAMED = {fault.name: fault for fault in FAULTS}
OLDER = NAMED["an older version served"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


def made(
    folder: Path, model: str, fault: Fault | None, patch: pytest.MonkeyPatch, *words: str,
    gone: Sequence[int] = (),
) -> Path:  # fmt: skip
    """A file of step 8 of a run of the zoo. `gone`: versions that its store does not keep any more."""
    sections = dict(fault.sections) if fault else {}
    few = {"iterations": 10, "groups": 2}
    spec = zoo_spec(algorithm=few, evaluation={"every": 0, "problems": 0}, seed=3, **sections)
    world = ZooWorld(folder / "run", model, spec)
    if fault is not None:
        fault.plant(world)
    world.live()
    for version in gone:
        for key in world.context.store.list(f"runs/test-1/weights/v{version:06d}/"):
            world.context.store.delete(key)
    file = folder / "step.tar.zst"
    with patch.context() as patched:
        patched.setattr("infra.run_bus.connect", lambda record, name: world.context.bus)
        said = ["bundle", "test-1", "--step", str(_STEP), "--store", world.context.store.url, "-o", str(file)]
        result = CliRunner().invoke(app, [*said, *words])
    assert result.exit_code == 0, result.output
    return file


def explained(file: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["explain", str(file), "--json"])
    assert result.exit_code in (0, 1), result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return found


@pytest.mark.parametrize("name", _OLD)
def test_the_cause_is_found_in_the_step_file(
    tmp_path: Path, model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = NAMED[name]
    first = explained(made(tmp_path, model, fault, monkeypatch))[0]
    assert (first["step"], first["stage"]) == (_STEP, "generation")
    assert fault.cause in first["cause"] and first["certainty"] == 1.0


def test_a_step_without_a_gap_has_no_older_weights(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path, model, None, monkeypatch)
    (tmp_path / "open").mkdir()
    assert not open_step_file(file, tmp_path / "open").versions
    assert not explained(file)


def test_what_is_not_cheap_is_left_out_and_the_command_for_it_named(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions_beside, "_SHARE", 0.0)
    first = explained(made(tmp_path / "a", model, OLDER, monkeypatch))[0]
    assert first["cause"] == "generators and trainer compute different things with the same weights"
    assert any("no weights of versions 0, 7" in one for one in first["evidence"])
    assert first["command"] == f"streamrl bundle test-1 --step {_STEP} --regenerate"
    first = explained(made(tmp_path / "b", model, OLDER, monkeypatch, "--regenerate"))[0]
    assert OLDER.cause in first["cause"]


def test_a_file_of_an_older_release_still_tells_what_the_steps_own_weights_can(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "versions_beside", lambda *_, **more: {})
    fault = NAMED["logprobs at another temperature"]
    assert fault.cause in explained(made(tmp_path, model, fault, monkeypatch))[0]["cause"]


def test_versions_that_are_gone_are_left_out(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = made(tmp_path, model, OLDER, monkeypatch, gone=[0, 6])
    (tmp_path / "open").mkdir()
    found = open_step_file(file, tmp_path / "open").versions
    assert found
    assert {0, 6}.isdisjoint(found)
