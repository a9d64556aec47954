"""The past that a fork has in common with its run, beyond weights and problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from consumers.learners.learner import TorchLearner
from consumers.replay import Again
from consumers.stream.inherited_groups import InheritedError, groups_before
from flows.run.forking import ForkRequest, make_fork
from flows.run.reading import OpenRun
from infra.bus import ends_of
from infra.keys import ring_from_env
from infra.memory_bus import MemoryBus
from infra.runs import RunRecord
from infra.sealed import sealed
from tests.factories import make_tiny_model
from tests.fakes.crashing import Crash, World
from tests.long.test_fork import context_of, goes_on, world_of

REPLAY = {"loss": {"kind": "tb", "replay": 0.5}, "algorithm": {"iterations": 8}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


def forked(parent: World, model: str, at: int, *changes: str, said: list[str] | None = None) -> RunRecord:
    spec = parent.context.spec
    again = Again(parent.context, lambda: TorchLearner(model, spec), lambda done, total: None)
    try:
        say = print if said is None else said.append
        return make_fork(again, parent.context, ForkRequest(at, changes), say=say)
    finally:
        again.close()


def rows_of(world: World, first: int = 0) -> list[tuple[str, list[tuple[int, int]], int]]:
    """Of each step its root, and its samples, and how many of them are replayed.

    The order in which a step's groups got whole is not compared: it depends on timing, and changes no bit.
    """
    return [
        (step.root_out, sorted(zip(step.groups.tolist(), step.indexes.tolist(), strict=True)), step.replayed)
        for step in world.ledger()
        if step.step >= first
    ]


def bus_of(world: World) -> MemoryBus:
    assert isinstance(world.context.bus, MemoryBus)
    return world.context.bus


def test_it_replays_what_its_run_replayed_when_that_is_gone(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model, **REPLAY)
    parent.live()
    expected = rows_of(parent)
    assert sum(replayed for *_, replayed in expected) > 0
    first = forked(parent, model, 4)
    copied = sum(ends_of(bus_of(parent), context_of(parent.context, first).topics.samples).values())
    assert copied == 4 * 4 * 4, "the samples of four steps"
    bus_of(parent).delete_topics([topic.name for topic in parent.context.topics.all()])
    for key in parent.context.store.list("runs/test-1"):
        parent.context.store.delete(key)
    fork = goes_on(parent, model, first)
    assert rows_of(fork) == expected[4:]
    second = goes_on(fork, model, forked(fork, model, 6))
    assert rows_of(second) == expected[6:], "so does a fork of the fork"


def test_it_replays_the_same_after_a_crash(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model, **REPLAY)
    parent.live()
    record = forked(parent, model, 5)
    whole = goes_on(parent, model, forked(parent, model, 5))
    fork = goes_on(parent, model, record, Crash("send test-2.ledger 6 1", "after"))
    assert [step.step for step in fork.ledger()] == [5, 6]
    fork.live()
    assert rows_of(fork) == rows_of(whole)
    assert rows_of(fork) == rows_of(parent, 5)
    # the ledger of a fork begins with its first step, and its readers know
    assert [step.step for step in OpenRun(fork.context).ledger(7)] == [7]
    assert len(list(OpenRun(fork.context).samples(6))) == 4 * 4 + 2 * 4


def test_groups_whose_samples_are_gone_are_not_replayed(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model, **REPLAY)
    parent.live()
    step = parent.ledger()[1]
    topic = parent.context.topics.samples
    for partition in range(topic.partitions):
        until = max(
            offset
            for part, offset in zip(step.partitions.tolist(), step.offsets.tolist(), strict=True)
            if part == partition
        )
        bus_of(parent).truncate(topic, partition, until + 1)
    said: list[str] = []
    record = forked(parent, model, 6, said=said)
    assert any("of 8 earlier groups neither log nor archive has the samples" in one for one in said), said
    fork = goes_on(parent, model, record)
    assert [step.step for step in fork.ledger()] == [6, 7]
    assert all(step.replayed == 8 for step in fork.ledger())


def test_samples_that_would_be_drawn_otherwise_are_not_replayed(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model, **REPLAY)
    parent.live()
    said: list[str] = []
    record = forked(parent, model, 4, "sampling.temperature=0.9", said=said)
    assert any("with other sampling.temperature their samples or rewards" in one for one in said), said
    assert not sum(ends_of(bus_of(parent), context_of(parent.context, record).topics.samples).values())
    fork = goes_on(parent, model, record)
    assert fork.ledger()[0].replayed == 0
    assert fork.ledger()[1].replayed == 8


def test_a_loss_that_replays_only_from_there_on_has_the_past_to_replay(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model, loss={"kind": "tb"})
    parent.live()
    fork = goes_on(parent, model, forked(parent, model, 2, "loss.replay=1.0"))
    assert fork.ledger()[0].replayed == 4 * 4


def test_a_damaged_list_of_groups_is_refused(tmp_path: Path, model: str) -> None:
    parent = world_of(tmp_path, model, **REPLAY)
    parent.live()
    context = context_of(parent.context, forked(parent, model, 4))
    assert len(groups_before(context, 4)) == 16
    key, store = "runs/test-2/inherited.json", context.store
    said = json.loads(store.get(key))
    del said["digest"]
    changes: list[dict[str, Any]] = [
        {"run": "test-9"}, {"offsets": "AAAA"}, {"offsets": "!"}, {"members": None},
        {"iterations": "//////////8="}, {"partitions": "CQAJAA=="},
    ]  # fmt: skip
    for raw in (
        b"{", b"[]", json.dumps(said | {"digest": "0"}).encode(),
        *(sealed(said | change, ring_from_env(), "inherited groups") for change in changes),
    ):  # fmt: skip
        store.put(key, raw)
        with pytest.raises(InheritedError, match="remove this run"):
            groups_before(context, 4)
