"""A step taken again: the same bits, or what is in the way; and which samples spoil a step that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from msgspec import structs
from typer.testing import CliRunner

from consumers.learners.learner import TorchLearner
from consumers.replay import Again
from consumers.steps.failed_rewards import RewardsFail
from consumers.steps.failing import FailedSteps, TrainingFailed
from flows.cli import app
from flows.cli.replay import steps_of
from flows.run import replaying
from infra import runs
from infra.bus import BusError
from schemas.messages import Sample
from schemas.stages import Stage
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import AFTER, Crash, World

ALGORITHM = {"iterations": 5, "groups": 2, "group_size": 2, "learning_rate": 1e-2}
TRAINER = {"checkpoint_every": 2, "keep_checkpoints": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


def world_of(folder: Path, model: str, **sections: Any) -> World:
    spec = make_spec(algorithm=ALGORITHM | sections.pop("algorithm", {}), trainer=TRAINER, **sections)
    context = make_context(spec, folder)
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    return World(context, model)


def again(world: World, model: str, **changes: Any) -> Again:
    spec = world.context.spec
    spec = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update=changes)})
    return Again(world.context, lambda: TorchLearner(model, spec), lambda done, total: None)


def everything(world: World) -> Any:
    bus, store = world.context.bus, world.context.store
    topics = [(t.name, [len(part) for part in bus.log(t)]) for t in world.context.topics.all()]  # type: ignore[attr-defined]
    return topics, {key: store.get(key) for key in store.list("")}


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "150")
    return CliRunner()


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"loss": {"kind": "ppo", "value_learning_rate": 1e-2}},
        {"loss": {"correction": "decoupled"}, "algorithm": {"optimizer_steps": 2, "iterations": 3}},
        {"algorithm": {"mode": "async", "staleness": 1}},
    ],
    ids=["grpo", "ppo", "several steps", "async"],
)
def test_every_step_comes_to_the_same_bits_and_nothing_is_written(
    tmp_path: Path, model: str, sections: dict[str, Any]
) -> None:
    world = world_of(tmp_path, model, **sections)
    world.live()
    before, steps = everything(world), world.ledger()
    for step in steps:
        found = again(world, model).step(step.step)
        assert found.equal and found.same_recipe and not found.others
        assert found.record == step
        assert found.taken.update.norm == step.metrics["grad_norm"]
    newest = again(world, model).step(None)
    assert newest.record == steps[-1]
    assert everything(world) == before


def test_it_begins_at_the_newest_checkpoint_before(tmp_path: Path, model: str) -> None:
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.ledger 3 1", AFTER))  # the newest checkpoint is that of iteration 2
    starts = [again(world, model).step(number).start for number in range(4)]
    assert starts == ["the model that the run began with"] * 2 + ["the checkpoint of iteration 2"] * 2


def test_other_bits_are_found(tmp_path: Path, model: str) -> None:
    world = world_of(tmp_path, model)
    world.live(Crash("send test-1.ledger 3 1", AFTER))
    found = again(world, model, learning_rate=2e-2).step(3)
    assert not found.equal
    assert found.others == [2]


def test_what_is_gone_is_named(tmp_path: Path, model: str) -> None:
    world = world_of(tmp_path, model)
    world.live()
    with pytest.raises(TrainingFailed, match="ends with step 4: it has no step 9"):
        again(world, model).step(9)
    for partition in range(2):
        world.context.bus.truncate(world.context.topics.samples, partition, 3)  # type: ignore[attr-defined]
    with pytest.raises(BusError, match=r"test-1\.samples\[0\]@\d is gone, one of the samples of step 0:"):
        again(world, model).step(1)


def test_on_the_command_line(
    tmp_path: Path, model: str, cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, model)
    world.live()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: world.context.bus)
    words = ["replay", "test-1", "--store", world.context.store.url]
    result = cli.invoke(app, [*words, "--step", "3"])
    assert result.exit_code == 0, result.output
    assert "step 3 of iteration 3, run test-1: 4 samples of 2 groups, 6 to 7; from the model" in result.output
    assert world.ledger()[3].root_out in result.output
    assert "the same bits" in result.output
    assert result.output.count("equal") == len(Stage)
    result = cli.invoke(app, [*words, "--failed"])
    assert result.exit_code == 1
    assert "has no record of a failed step of run test-1" in result.output
    other = make_tiny_model(tmp_path / "other", layers=1, width=16, seed=3)
    record = world.context.record.model_copy(update={"model": str(other)})
    monkeypatch.setattr(replaying, "find", lambda store, run: record)
    result = cli.invoke(app, words)
    assert (result.exit_code, "OTHER BITS" in result.output) == (0, False)  # its checkpoint says all
    result = cli.invoke(app, [*words, "--step", "1"])
    assert result.exit_code == 1
    assert "OTHER BITS" in result.output


def test_a_sample_that_spoils_a_step_is_found(
    tmp_path: Path, model: str, cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, model, loss={"kind": "dr_grpo"})

    def spoil(sample: Sample) -> Sample:
        return structs.replace(sample, reward=1e30) if (sample.group, sample.index) == (7, 1) else sample

    world.edit = spoil
    with pytest.raises(TrainingFailed) as failure:
        world.live()
    message = str(failure.value)
    assert message.startswith("step 3: a gradient is NaN, infinite or too large")
    assert "0000007-01" in message
    command = f"streamrl replay test-1 --failed --store {world.context.store.url}"
    assert command in message
    assert [step.step for step in world.ledger()] == [0, 1, 2], "nothing of it is in the ledger"
    record = FailedSteps(world.context.store, "test-1").find()
    assert (record.step, record.trainer_epoch, record.root_out) == (3, 0, "")
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: world.context.bus)
    before = everything(world)
    result = cli.invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output
    assert "step 3 of iteration 3, run test-1, which could not be taken" in result.output
    assert "sample 0000007-01, by itself: a gradient is NaN, infinite or too large" in result.output
    assert "sample 0000006-0" not in result.output
    assert everything(world) == before
    with pytest.raises(TrainingFailed, match="step 3: "):
        world.live()  # started again, it stops at the same place
    assert FailedSteps(world.context.store, "test-1").find(3).trainer_epoch == 1


@pytest.mark.parametrize("exact", [True, False])
def test_weights_that_became_nan_by_themselves(tmp_path: Path, model: str, exact: bool) -> None:
    world = world_of(tmp_path, model)
    settings = world.context.spec.trainer.model_copy(update={"exact_sums": exact})
    world.context.record.spec = world.context.spec.model_copy(update={"trainer": settings})

    def tamper(learner: Any) -> None:
        step, taken = learner.step, []

        def spoilt(total: float) -> Any:
            taken.append(total)
            done = step(total)
            if len(taken) == 3:
                with torch.no_grad():
                    next(iter(learner._policy.named.values())).view(-1)[5] = float("nan")
            return done

        learner.step = spoilt

    with pytest.raises(TrainingFailed, match="step 2: the optimizer step left NaN or infinity in model"):
        world.live(tamper=tamper)
    assert [step.step for step in world.ledger()] == [0, 1]
    assert again(world, model).failed(None).reason == "", "its samples are not to blame"
    world.live()
    assert len(world.ledger()) == 5


def test_a_step_without_any_reward_stops_the_run(tmp_path: Path, model: str) -> None:
    world = world_of(tmp_path, model)

    def fail(sample: Sample) -> Sample:
        return structs.replace(sample, reward_error="it took 11 s") if sample.iteration == 1 else sample

    world.edit = fail
    with pytest.raises(TrainingFailed, match=r"step 1: no sample has a reward: it took 11 s.*0000002-00, "):
        world.live()
    assert len(world.ledger()) == 1


def test_a_step_without_a_gradient_leaves_weights_and_optimizer_alone(tmp_path: Path, model: str) -> None:
    world = world_of(tmp_path, model)

    def alike(sample: Sample) -> Sample:
        return structs.replace(sample, reward=0.5) if sample.iteration in (1, 3) else sample

    world.edit = alike
    life = world.live(Crash("send test-1.ledger 4 1"))
    steps = world.ledger()
    assert [step.metrics["skipped"] for step in steps] == [0, 1, 0, 1]
    roots = [step.root_out for step in steps]
    assert roots[0] == roots[1] != roots[2] == roots[3]
    assert life.heart.counters["skipped_steps"] == 2
    again_ = world.live()
    assert "skipped_steps" not in again_.heart.counters
    assert again(world, model).step(4).equal


def test_a_run_of_failing_rewards_ends_and_can_be_resumed(tmp_path: Path, model: str) -> None:
    """The steps stand, each with the reason and an example, and a resumed run goes on behind them."""
    world = world_of(tmp_path, model, algorithm={"iterations": 4, "groups": 4})

    def fails(sample: Sample) -> Sample:
        failed = sample.iteration in (1, 2) and sample.group % 4
        return structs.replace(sample, reward_error=f"KeyError: {sample.iteration}") if failed else sample

    world.edit = fails
    with pytest.raises(RewardsFail, match=r"^12 of the 16 samples of iterations 1 and 2 have no reward"):
        world.live()
    steps = world.ledger()
    assert [(step.failed_reason, step.failed_sample) for step in steps] == [
        ("", ""), ("KeyError: 1", "0000005-00"), ("KeyError: 2", "0000009-00"),
    ]  # fmt: skip
    world.live()
    assert len(world.ledger()) == 4


@pytest.mark.parametrize("said", ["²", "1-³", "9" * 5_000, "-1", ""])
def test_what_is_no_step_is_said(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        steps_of(said)
    assert "write the number of a step" in capsys.readouterr().err
