"""A ledger with records that can't be used: most are passed over; one that may be a step stops the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from consumers.steps.ledger import steps_in_ledger
from consumers.stream.sample_stream import CAME_BEFORE
from flows.cli import app
from flows.run import skipping
from infra import runs
from infra.bad_step import BadStep
from infra.bus import read_all
from infra.gate import Gate, passed_over
from infra.skipped import add_skipped
from schemas.messages import DeadLetter, StepRecord
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.fakes.crashing import AFTER, Crash, World, hurry
from tests.feeding import make_step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    hurry(monkeypatch, model, make_spec())


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    return CliRunner()


def world_of(folder: Path, model: str, **sections: Any) -> World:
    algorithm = {"iterations": 5, "groups": 2, "group_size": 2, "learning_rate": 1e-2}
    spec = make_spec(
        algorithm=algorithm | sections.pop("algorithm", {}), trainer={"checkpoint_every": 2}, **sections
    )
    context = make_context(spec, folder)
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    return World(context, model)


def put(world: World, value: bytes, key: str) -> None:
    world.context.writer.send(world.context.topics.ledger, value, key=key)


def reasons(world: World) -> list[str]:
    records = read_all(world.context.bus, world.context.topics.dead, deadline_s=5)
    found = [decode(record.value, DeadLetter) for record in records]
    return [letter.reason for letter in found if CAME_BEFORE not in letter.reason]


def test_what_can_not_be_a_step_that_is_needed_is_a_dead_letter(tmp_path: Path, model: str) -> None:
    world = world_of(tmp_path, model)
    put(world, b"rubbish", "who knows")
    put(world, b"rubbish", "99999999999999999999999")
    put(world, b"rubbish", "77")  # the run has 5 steps
    world.live(Crash("send test-1.ledger 2 1", AFTER))
    first = steps_there(world)[0]
    put(world, encode(structs.replace(first, run="other-1")), "3")
    put(world, b"rubbish", "0")  # it is trained, whatever this says
    assert not world.live().dead
    assert [step.step for step in steps_there(world)] == list(range(5))
    found = reasons(world)
    assert len([one for one in found if "too few for a StreamRL record" in one]) >= 4
    assert len([one for one in found if one == "it is of run other-1"]) == 1


def steps_there(world: World) -> list[StepRecord]:
    """Records that can be used, in order."""
    records = read_all(world.context.bus, world.context.topics.ledger, deadline_s=5)
    return Gate(StepRecord, "test-1", passed_over).messages(records)


@pytest.mark.parametrize("kind", ["rubbish", "of no iteration", "truncated"])
def test_a_record_that_may_be_a_step_stops_the_run_until_it_is_skipped(
    tmp_path: Path, model: str, cli: CliRunner, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.ledger 2 1", AFTER))
    third = structs.replace(steps_there(world)[2], step=3)  # says iteration 2
    put(
        world, {"rubbish": b"?", "of no iteration": encode(third), "truncated": encode(third)[:-1]}[kind], "3"
    )
    end = len(world.context.bus.log(world.context.topics.ledger)[0]) - 1  # type: ignore[attr-defined]
    for _ in range(2):  # and each time that it is started
        with pytest.raises(BadStep, match=rf"test-1\.ledger\[0\]@{end} can't be used.*streamrl skip test-1"):
            world.live()
    monkeypatch.setattr(skipping, "connect", lambda record, name: world.context.bus)
    place = f"test-1.ledger[0]@{end}"
    say = ["skip", "test-1", place, "--store", world.context.store.url]
    for answer in ("the run goes on past it", "it was on the run's list already"):
        result = cli.invoke(app, say)
        assert result.exit_code == 0 and answer in result.output, result.output
    assert not world.live().dead
    assert sorted({step.step for step in steps_there(world) if step.iteration == step.step}) == list(range(5))


def test_skip_refuses_what_is_not_there_or_sound(
    tmp_path: Path, model: str, cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.ledger 2 1", AFTER))
    monkeypatch.setattr(skipping, "connect", lambda record, name: world.context.bus)
    for place, reason in {
        "test-1.ledger[0]@1": "can be read, and is of run test-1",
        "test-1.ledger[0]@17": "test-1.ledger[0] has no record 17: the partition goes from 0 to 2",
        "test-1.ledger[4]@0": "has no partition 4",
        "test-1.evals[0]@0": "has no record 0: the partition is empty",
        "other.ledger[0]@0": "run test-1 has no topic other.ledger; it has test-1.prompts",
        "ledger": "is no place of a record",
    }.items():
        result = cli.invoke(app, ["skip", "test-1", place, "--store", world.context.store.url])
        assert result.exit_code == 1 and reason in result.output, result.output
    assert not world.context.store.exists("runs/test-1/skipped.json")
    sound = ["skip", "test-1", "test-1.ledger[0]@1", "--force", "--store", world.context.store.url]
    assert cli.invoke(app, sound).exit_code == 0
    assert world.context.store.exists("runs/test-1/skipped.json")


def test_a_step_that_was_given_up_is_what_its_published_weights_say(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 3 is damaged in the log, and weights 4 stand."""
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.weights newest 5", AFTER))  # 4 is announced
    log = world.context.bus.log(world.context.topics.ledger)[0]  # type: ignore[attr-defined]
    at = next(n for n, record in enumerate(log) if record.key == b"3")
    log[at] = replace(log[at], value=b"rubbish")
    with pytest.raises(BadStep):
        world.live()
    add_skipped(world.context.store, "test-1", ("test-1.ledger", 0, at), "damaged")
    assert not world.live().dead
    assert "weights 4, which are published, are used" in caplog.text
    assert [step.step for step in steps_there(world)] == [0, 1, 2, 4]


def test_a_step_behind_the_last_one_hides_no_later_step(tmp_path: Path) -> None:
    """It is well-formed, and only its number can't be: whoever reads all steps passed over the later ones."""
    spec = make_spec(algorithm={"iterations": 3})
    context = make_context(spec, tmp_path)
    for number in (0, 1, 999, 2):
        step = make_step(spec, number, [make_sample(spec, number * spec.algorithm.groups, 0)])
        context.writer.send(context.topics.ledger, encode(step), key=str(number))
    assert [step.step for step in steps_in_ledger(context)] == [0, 1, 2]
