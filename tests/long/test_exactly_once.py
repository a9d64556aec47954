"""Kill the trainer at any of its writes: the run that goes on trains the same samples, to the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from consumers.trainer import Trainer
from infra.stores.store import StoreError
from infra.stores.store_identity import identify
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import AFTER, BEFORE, TORN, Crash, Life, World, crashes_of, hurry

ALGORITHM = {"iterations": 4, "groups": 2, "group_size": 2, "learning_rate": 1e-2}
TRAINER = {"checkpoint_every": 2, "keep_checkpoints": 1, "keep_weights": 4}
SEVERAL_STEPS = {"optimizer_steps": 2, "iterations": 3}


def spec_of(**sections: Any) -> RunSpec:
    algorithm = {**ALGORITHM, **sections.pop("algorithm", {})}
    return make_spec(algorithm=algorithm, trainer=TRAINER, **sections)


def world_of(folder: Path, spec: RunSpec, model: str, seed: int = 0) -> World:
    world = World(make_context(spec, folder), model, seed)
    if spec.loss.most_draws:
        world.edit = lambda sample: structs.replace(sample, reward=0.5) if sample.group % 3 == 1 else sample
    return world


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    hurry(monkeypatch, model, spec_of())
    monkeypatch.setattr(
        "infra.stores.file_store.os.fsync", lambda number: None
    )  # a process dies here, not the machine


@pytest.mark.parametrize(
    ("sections", "every"),
    [
        ({}, 1),
        ({"loss": {"kind": "ppo", "value_learning_rate": 1e-2}}, 6),
        ({"loss": {"correction": "decoupled"}, "algorithm": SEVERAL_STEPS}, 5),
        ({"model": {"dtype": "bfloat16"}}, 10),
        ({"loss": {"kind": "dapo", "resample": 2}}, 7),
        ({"loss": {"kind": "tb", "replay": 0.5}}, 11),
    ],
    ids=["grpo", "ppo", "several steps", "bfloat16", "resampling", "replay"],
)
def test_a_crash_at_any_write(tmp_path: Path, model: str, sections: dict[str, Any], every: int) -> None:
    spec = spec_of(**sections)
    calm = world_of(tmp_path / "calm", spec, model)
    crashes = crashes_of(calm.live().writes)
    expected = calm.outcome()
    assert len(crashes) > 40
    assert len({root for *_, root in expected}) == len(expected), "a step changed nothing"
    for number, crash in list(enumerate(crashes))[::every]:
        world = world_of(tmp_path / str(number), spec, model, seed=number)
        assert world.live(crash).dead or not crash.certain, crash
        assert not world.live().dead
        assert world.outcome() == expected, crash


@pytest.mark.parametrize(("steps", "every"), [(1, 5), (2, 7)])
def test_a_crash_at_any_write_of_an_async_run(tmp_path: Path, model: str, steps: int, every: int) -> None:
    """What is trained together is decided by timing; which samples a step is made of is not."""
    spec = spec_of(algorithm={"mode": "async", "staleness": 1, "optimizer_steps": steps})
    calm = world_of(tmp_path / "calm", spec, model)
    crashes = crashes_of(calm.live().writes)
    expected = [(step, samples) for step, samples, _ in calm.outcome()]
    for number, crash in list(enumerate(crashes))[::every]:
        world = world_of(tmp_path / str(number), spec, model, seed=number)
        assert world.live(crash).dead or not crash.certain, crash
        assert not world.live().dead
        assert [(step, samples) for step, samples, _ in world.outcome()] == expected, crash


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_crashes_in_a_row(tmp_path_factory: pytest.TempPathFactory, model: str, data: st.DataObject) -> None:
    spec, folder = spec_of(), tmp_path_factory.mktemp("worlds")
    calm = world_of(folder / "calm", spec, model)
    writes = sorted({crash.write for crash in crashes_of(calm.live().writes)})
    world = world_of(folder / "wild", spec, model, seed=data.draw(st.integers(0, 99)))
    for start in range(data.draw(st.integers(2, 3))):
        when = data.draw(st.sampled_from([BEFORE, TORN, AFTER]))
        world.live(Crash(data.draw(st.sampled_from(writes)).replace("e00", f"e{start:02d}"), when))
    assert not world.live().dead
    assert world.outcome() == calm.outcome()


def test_a_store_that_vanishes_ends_the_trainer_and_gets_nothing(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left under a disk's mount point looks like a new store: all steps would be trained into it."""
    world = world_of(tmp_path, spec_of(), model)
    identify(world.context.store)
    store, written = tmp_path / "store", Life.write

    def unmounting(life: Life, what: str, *effects: Any) -> None:
        if what.startswith("put") and "/weights/v000002" in what and store.stat().st_nlink > 2:
            store.rename(tmp_path / "elsewhere")
            store.mkdir()
        written(life, what, *effects)

    monkeypatch.setattr(Life, "write", unmounting)
    with pytest.raises(StoreError, match=r"is not the one that this run began in .* is it mounted"):
        world.live()
    assert list(store.iterdir()) == []
    assert len(world.ledger()) < 4


def test_steps_are_taken_again_as_recorded_with_other_micro_batches(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run may cut otherwise: what is in the ledger is cut as it was, and comes to the same bits."""
    trainer = {**TRAINER, "checkpoint_every": 100, "exact_sums": False, "least_microbatches": 1}
    algorithm = {**ALGORITHM, "group_size": 6}
    spec = make_spec(algorithm=algorithm, trainer={**trainer, "microbatch_tokens": 24})
    world = World(make_context(spec, tmp_path), model)
    ledger = [write for write in world_of(tmp_path / "calm", spec, model).live().writes if "ledger" in write]
    name = next(write for write in ledger if write.startswith("send"))
    assert world.live(Crash(f"{name.rpartition(' ')[0]} 2 1", AFTER)).dead
    recorded = [(step.step, step.root_out, step.microbatches.tolist()) for step in world.ledger()]
    assert len(recorded) == 3 and max(len(cut) for _, _, cut in recorded) > 1
    larger = make_spec(algorithm=algorithm, trainer={**trainer, "microbatch_tokens": 200})
    world.context = dataclasses.replace(
        world.context, record=world.context.record.model_copy(update={"spec": larger})
    )
    adopted: list[StepRecord] = []
    monkeypatch.setattr(Trainer, "_adopt", lambda trainer, record, root: adopted.append(record) or root)
    world.live()
    steps = world.ledger()
    assert not adopted, "steps that were taken again came to other bits"
    assert [(step.step, step.root_out, step.microbatches.tolist()) for step in steps[:3]] == recorded
    assert len(steps) == 4 and len(steps[3].microbatches) < len(recorded[0][2])
