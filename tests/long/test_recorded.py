"""Training again what was trained: by position, by seed, from this run's log or another's."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.batches.log_places import fetch
from consumers.stream.recorded_groups import RecordedError, RecordedStream
from consumers.stream.recorded_places import Recorded
from infra import runs
from infra.memory_bus import MemoryBus
from infra.roles.context import RoleContext
from infra.roles.heart import Heart
from schemas.messages import Evaluation, StepRecord
from schemas.runspec import RunSpec
from schemas.topics import Topic, Topics
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.fakes.crashing import Crash, World, crashes_of

SPEC = make_spec(algorithm={"iterations": 4})


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 999)), min_size=1, max_size=40))
@settings(deadline=None, max_examples=30)
def test_samples_are_found_by_their_places(places: list[tuple[int, int]]) -> None:
    bus, topic = MemoryBus(), Topic("t.samples", 3)
    bus.create_topics([topic])
    some = [make_sample(SPEC, 0, index) for index in range(2)]
    writer = bus.writer()
    for partition in range(3):
        for number in range(1000):
            writer.send(topic, _ENCODED[number % 2], key="k", partition=partition)
    rows = fetch(bus, topic, places, what="samples", deadline_s=10)
    assert [(row.partition, row.offset) for row in rows] == places
    assert [row.sample.id for row in rows] == [some[offset % 2].id for _, offset in places]


_ENCODED = [encode(make_sample(SPEC, 0, index)) for index in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def another(context: RoleContext, spec: RunSpec, run: str) -> RoleContext:
    """A context of another run on the same bus and store."""
    record = context.record.model_copy(update={"id": run, "spec": spec})
    topics = Topics(run, spec.lengths.classes)
    context.bus.create_topics(topics.all())
    return replace(context, record=record, topics=topics, heart=Heart(run, "trainer", 0))


def trained(context: RoleContext, model: str) -> list[StepRecord]:
    """Run its trainer to the end; its ledger."""
    world = World(context, model)
    world.live()
    return world.ledger()


def recorded(folder: Path, model: str, **sections: Any) -> tuple[RoleContext, list[StepRecord]]:
    """A run that has trained 16 groups."""
    spec = make_spec(**{"algorithm": {"iterations": 4}} | sections)
    context = make_context(spec, folder)
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    return context, trained(context, model)


OFFLINE = {"mode": "offline", "recorded": "test-1", "iterations": 6, "groups": 6}


def test_an_offline_run_trains_what_another_trained(tmp_path: Path, model: str) -> None:
    context, _ = recorded(tmp_path, model)
    loss = {"correction": "truncated", "kl": 0.1, "reference": "samples"}
    offline = another(context, make_spec(algorithm=OFFLINE, loss=loss), "test-2")
    steps = trained(offline, model)
    # 16 groups, 6 a step: an epoch is two steps, and no group comes twice in it
    epochs = [np.concatenate([step.groups for step in steps[start : start + 2]]) for start in (0, 2, 4)]
    for groups in epochs:
        assert len(groups) == 24
        assert len(set(groups.tolist())) == 12
    assert epochs[0].tolist() != epochs[1].tolist()
    assert steps[0].metrics["gap_tokens"] == 0  # all of them are somebody else's
    assert steps[-1].metrics["divergence"] > 0


def test_an_offline_run_that_is_resumed_ends_with_the_same_bits(tmp_path: Path, model: str) -> None:
    context, _ = recorded(tmp_path, model)
    straight = trained(another(context, make_spec(algorithm=OFFLINE), "test-2"), model)
    short = make_spec(algorithm=OFFLINE | {"iterations": 3})
    trained(another(context, short, "test-3"), model)
    more = make_sample(SPEC, 0, 0)  # what comes after it began does not matter
    context.writer.send(context.topics.samples, encode(more), key=more.id)
    again = trained(another(context, make_spec(algorithm=OFFLINE), "test-3"), model)
    assert [step.root_out for step in again] == [step.root_out for step in straight]


def test_an_offline_run_may_crash_at_any_write(tmp_path: Path, model: str) -> None:
    context, _ = recorded(tmp_path, model)
    spec = make_spec(algorithm=OFFLINE | {"iterations": 2}, trainer={"checkpoint_every": 1})
    calm = World(another(context, spec, "calm-1"), model)
    crashes = crashes_of(calm.live().writes)
    for number, crash in list(enumerate(crashes))[:: len(crashes) // 12]:
        run = f"wild-{number}"
        world = World(another(context, spec, run), model)
        assert world.live(Crash(crash.write.replace("calm-1", run), crash.when)).dead, crash
        assert not world.live().dead
        assert [step.root_out for step in world.ledger()] == [step.root_out for step in calm.ledger()], crash


def test_what_can_not_be_trained_again_is_said(tmp_path: Path, model: str) -> None:
    context, _ = recorded(tmp_path, model)
    warm = make_spec(algorithm=OFFLINE, sampling={"temperature": 0.5})
    with pytest.raises(RecordedError, match=r"sampled at temperature 1, and sampling\.temperature is 0\.5"):
        trained(another(context, warm, "test-2"), model)
    barred = make_spec(algorithm=OFFLINE, sampling={"min_tokens": 2})
    with pytest.raises(RecordedError, match=r"sampled with min_tokens 0, and sampling\.min_tokens is 2 here"):
        trained(another(context, barred, "test-6"), model)
    large = make_spec(algorithm=OFFLINE | {"groups": 17})
    with pytest.raises(RecordedError, match="has trained 16 groups; a step of this run takes 17"):
        trained(another(context, large, "test-3"), model)
    with pytest.raises(runs.RunError, match="there is no run none-1"):
        trained(another(context, make_spec(algorithm=OFFLINE | {"recorded": "none-1"}), "test-4"), model)
    small = World(another(context, make_spec(algorithm=OFFLINE), "test-5"), model)
    with pytest.raises(RecordedError, match="has tokens that the model's vocabulary of 6 has not"):
        small.live(tamper=lambda learner: setattr(learner, "vocabulary", 6))
    second = another(context, make_spec(algorithm=OFFLINE), "test-6")
    runs.create(
        second.store, second.spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-6"
    )
    with pytest.raises(RecordedError, match=r"has made no samples, .*algorithm\.recorded: test-1"):
        trained(another(context, make_spec(algorithm=OFFLINE | {"recorded": "test-6"}), "test-7"), model)
    letters = tmp_path / "other"
    shutil.copytree(model, letters)
    (letters / "tokenizer.json").write_text("{}")
    alike = another(context, make_spec(algorithm=OFFLINE), "test-8")
    alike = replace(alike, record=alike.record.model_copy(update={"model": str(letters)}))
    with pytest.raises(RecordedError, match="has another tokenizer"):
        trained(alike, model)
    with pytest.raises(ValueError, match="offline needs `recorded`"):
        make_spec(algorithm={"mode": "offline"})


def test_trajectory_balance_trains_earlier_groups_again(tmp_path: Path, model: str) -> None:
    _, steps = recorded(tmp_path, model, loss={"kind": "tb", "replay": 0.5})
    for step in steps:
        again = sorted({group for group in step.groups.tolist() if group // 4 < step.iteration})
        assert len(again) == (2 if step.iteration else 0)
        assert {g for g in step.groups.tolist() if g // 4 == step.iteration} == set(
            range(step.iteration * 4, step.iteration * 4 + 4)
        )


def test_replay_is_the_same_for_a_trainer_that_was_interrupted(tmp_path: Path, model: str) -> None:
    loss = {"kind": "tb", "replay": 0.5}
    _, straight = recorded(tmp_path / "straight", model, loss=loss)
    context, half = recorded(tmp_path / "half", model, loss=loss, algorithm={"iterations": 2})
    assert len(half) == 2
    again = trained(another(context, make_spec(loss=loss, algorithm={"iterations": 4}), "test-1"), model)
    assert [step.root_out for step in again] == [step.root_out for step in straight]


def test_the_first_record_of_a_step_counts() -> None:
    def step(number: int, epoch: int, groups: list[int]) -> StepRecord:
        count = len(groups)
        return StepRecord(
            run="r", trainer_epoch=epoch, iteration=number, step=number, last_of_iteration=True,
            version_in=0, version_out=1, root_out="", recipe="",
            partitions=np.zeros(count, np.int16), offsets=np.arange(count) + 100 * epoch,
            groups=np.array(groups), indexes=np.array([groups[:n].count(g) for n, g in enumerate(groups)]),
            lengths=np.ones(count), rewards=np.zeros(count), versions=np.zeros(count),
            predicted=np.zeros(count), problem_ids=[], microbatches=np.ones(1), losses=np.zeros(1),
            metrics={}, finished_at=0.0,
        )  # fmt: skip

    found = Recorded(
        make_spec(algorithm={"groups": 2}).algorithm,
        [step(0, 0, [1, 0, 1, 0]), step(1, 0, [2, 2]), step(1, 1, [3, 3]), step(2, 1, [1, 4])],
    )
    assert len(found) == 4
    assert found.places([0, 1, 2, 3]) == [(0, 1), (0, 3), (0, 0), (0, 2), (0, 0), (0, 1), (0, 101)]


def test_an_offline_run_waits_until_its_weights_are_evaluated(tmp_path: Path, model: str) -> None:
    """Nothing is generated for it, so nothing else keeps the weights that generators evaluate."""
    context, _ = recorded(tmp_path, model)
    spec = make_spec(algorithm=OFFLINE, evaluation={"problems": 3, "every": 4})
    offline = another(context, spec, "test-2")
    stream = RecordedStream(offline, 24).open()
    assert stream.complete((0, 0)) == []
    assert stream.outstanding((0, 0)) == 3
    assert len(stream.complete((1, 0))) == 1
    evaluation = Evaluation(
        run="test-2", version=0, problem_ids=[], rewards=np.zeros(0, np.float32),
        lengths=np.zeros(0, np.int32), predicted=np.zeros(0, np.float32), failed=0, finished_at=0.0,
    )  # fmt: skip
    offline.writer.send(offline.topics.evals, encode(evaluation), key="0")
    assert stream.pump(5.0) == 1
    assert len(stream.complete((0, 0))) == 1
    assert stream.complete((4, 0)) == []
    stream.close()
