"""A run whose log retention has emptied replays, resumes and is trained again, from its archive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from consumers.batches.log_places import Gone
from consumers.learners.learner import TorchLearner
from consumers.replay import Again
from infra import runs
from infra.archive.archive_writing import ArchiveWriter
from infra.archive.archived_topics import archived_topics
from infra.archive.joined_bus import JoinedBus
from infra.roles.context import RoleContext
from infra.runs import find
from schemas.runspec import RunSpec
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World, hurry
from tests.long.test_recorded import another, trained

ALGORITHM = {"iterations": 4, "groups": 4, "group_size": 2, "learning_rate": 1e-2, "optimizer_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


def archive(context: RoleContext, *, forget: bool = True) -> int:
    """Archive what is new, and have retention remove all of it; return how many records there were."""
    bus = context.bus
    writer = ArchiveWriter(
        bus, context.store, context.topics, context.run, context.record.identity, deadline_s=5, window=30
    )
    done = writer.archive(now=1.0)
    for topic in archived_topics(context.topics).values():
        for part in range(topic.partitions) if forget and not topic.compacted else ():
            bus.truncate(topic, part, bus.end(topic, part))  # type: ignore[attr-defined]
    return done.records


def joined(context: RoleContext) -> RoleContext:
    """The same run, with its archive behind the log."""
    identity = context.record.identity

    def identity_of(run: str) -> str:
        return identity if run == context.run else find(context.store, run).identity

    return replace(context, bus=JoinedBus(context.bus, context.store, identity_of))


def begun(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch, **sections: object) -> World:
    spec = make_spec(algorithm=ALGORITHM, **sections)
    hurry(monkeypatch, model, spec)
    context = make_context(spec, folder)
    record = runs.create(
        context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1"
    )
    return World(replace(context, record=record), model)


def bits_of_replays(context: RoleContext, model: str) -> list[bool]:
    again = Again(context, lambda: TorchLearner(model, context.spec), lambda done, total: None)
    try:
        return [one.equal for one in again.each(0, again.newest())]
    finally:
        again.close()


def test_every_step_replays_to_the_same_bits(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = begun(tmp_path, model, monkeypatch)
    world.live()
    context = world.context
    assert archive(context) > 32
    with pytest.raises(Exception, match="no step"):
        bits_of_replays(context, model)
    assert bits_of_replays(joined(context), model) == [True] * 8
    assert archive(context) == 0


def test_without_an_archive_the_samples_are_gone(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = begun(tmp_path, model, monkeypatch)
    world.live()
    bus, samples = world.context.bus, world.context.topics.samples
    bus.truncate(samples, 0, 1)  # type: ignore[attr-defined]
    with pytest.raises(Gone, match="retention_hours"):
        bits_of_replays(joined(world.context), model)


@pytest.mark.parametrize("most", [25, 40, 50])
def test_a_run_is_resumed_behind_retention_and_comes_to_the_same_bits(
    most: int, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = begun(tmp_path / "straight", model, monkeypatch)
    straight.live()
    world = begun(tmp_path / "killed", model, monkeypatch)
    life = world.live(most=most)
    assert life.dead
    log = world.context
    archive(log)
    world.context = joined(log)
    assert not world.live().dead
    assert [one.root_out for one in world.ledger()] == [one.root_out for one in straight.ledger()]
    archive(log)
    assert bits_of_replays(world.context, model) == [True] * 8


def test_an_offline_run_trains_from_an_archive(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = begun(tmp_path, model, monkeypatch)
    world.live()
    offline: RunSpec = make_spec(
        algorithm={"mode": "offline", "recorded": "test-1", "iterations": 3, "groups": 4}
    )
    before = trained(another(world.context, offline, "test-2"), model)
    archive(world.context)
    third = World(joined(another(world.context, offline, "test-3")), model, log=world.log)
    third.live()
    found = third.ledger()
    assert [one.root_out for one in found] == [one.root_out for one in before]
    assert len(found) == 3
