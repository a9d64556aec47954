"""Commands that look back say what is missing, and what can still be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import make_tiny_model
from tests.long.test_recorded_samples import Done, over

COMMANDS = {
    "replay": "replay {run} --step {step}",
    "regenerate": "replay {run} --step {step} --regenerate",
    "rewards": "replay {run} --step {step} --rewards",
    "bundle": "bundle {run} --step {step} -o {folder}/step.tar.zst",
    "bisect": "bisect {run} --when different",
    "inspect": "inspect {run} --step {step}",
    "what-if": "what-if {run} --from {step} --set loss.clip_high=0.3",
    "fork": "fork {run} --at {step} -o {folder}/fork.yaml",
}
ALL = pytest.mark.parametrize("name", sorted(COMMANDS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture
def done(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Done:
    return over(tmp_path, model, monkeypatch)


def said(done: Done, command: str, *, run: str = "test-1", step: int = 1) -> str:
    """What a command that fails says, on one line."""
    result = done.cli(*command.format(run=run, step=step, folder=done.folder).split())
    assert result.exit_code in (1, 2, 3), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@ALL
def test_a_run_that_does_not_exist(done: Done, name: str) -> None:
    text = said(done, COMMANDS[name], run="none-1")
    assert "there is no run none-1" in text and "the newest there: test-1" in text
    assert "`streamrl runs` lists all" in text


def test_a_run_to_explain_that_does_not_exist(done: Done) -> None:
    assert "there is no run none-1" in said(done, "explain {run}", run="none-1")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"bisect", "fork"}))
def test_a_step_that_is_not_there_yet(done: Done, name: str) -> None:
    text = said(done, COMMANDS[name], step=99)
    assert "ends with step 3: it has no step 99. Name a step up to 3, or wait" in text


def test_a_fork_at_a_step_that_is_not_there_yet(done: Done) -> None:
    assert "can begin with step 1 to 4, not with 99" in said(done, COMMANDS["fork"], step=99)


@ALL
def test_samples_that_retention_has_removed(done: Done, name: str) -> None:
    bus, topic = done.world.context.bus, done.world.context.topics.samples
    cut = [
        step.offsets[step.partitions == part].max() for step in done.world.ledger()[1:2] for part in (0, 1)
    ]
    for part, offset in enumerate(cut):
        bus.truncate(topic, part, int(offset) + 1)  # type: ignore[attr-defined]
    text = said(done, COMMANDS[name])
    assert "is gone, one of the samples of step" in text and "retention_hours" in text
    assert "It is in no archive, either: from step 2 on all samples are there" in text
    assert "Step files that were made in time replay as ever" in text


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_ledger_whose_records_are_gone(done: Done, name: str) -> None:
    bus, topic = done.world.context.bus, done.world.context.topics.ledger
    bus.truncate(topic, 0, 1_000)  # type: ignore[attr-defined]
    text = said(done, COMMANDS[name])
    assert "the ledger of run test-1 has no step: none is taken yet, or its records were removed" in text
    assert "`streamrl status test-1 --store " in text
    text = said(done, "bisect {run} --when {step}>0".replace("{step}>0", "grad_norm>0"))
    assert "the ledger of run test-1 has no step" in text
    explained = done.cli("explain", "test-1")
    assert explained.exit_code == 0 and "nothing to explain" in explained.output


def test_a_first_record_of_the_ledger_that_is_gone(done: Done) -> None:
    bus, topic = done.world.context.bus, done.world.context.topics.ledger
    bus.truncate(topic, 0, 1)  # type: ignore[attr-defined]
    assert "the ledger has no usable record of step 0" in said(done, COMMANDS["replay"])
    assert "has no usable record of step 0, though its newest is 3" in said(done, COMMANDS["inspect"], step=0)
    assert done.cli("replay", "test-1", "--step", "3").exit_code == 0


def test_a_step_of_other_settings_or_of_another_version(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consumers.replay.recipe_of", lambda spec: "another")
    result = done.cli("replay", "test-1", "--step", "1")
    assert result.exit_code == 0, result.output
    assert "taken with other settings, or by another version of StreamRL" in " ".join(result.output.split())
