"""A feeder that starts again: the same prompts, whatever it was killed at and whatever is left of the log."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.bad_step import BadStep
from infra.bus import read_all
from infra.epochs import Replaced
from infra.memory_bus import MemoryBus, MemoryWriter
from infra.skipped import add_skipped
from schemas.messages import Prompt, RankerAnnouncement
from schemas.runspec import RunSpec
from schemas.topics import Topic
from schemas.wire import decode, encode
from tests.factories import make_spec
from tests.feeding import HELD_OUT, Life, Others, essence, fed, make_step
from tests.waiting import wait_until

SYNC = {"iterations": 6, "groups": 4, "group_size": 2}
ASYNC = {**SYNC, "mode": "async", "staleness": 1.5}
ARRIVAL = {**ASYNC, "order": "arrival", "staleness_cap": 3}


class Killed(Exception):
    """As kill -9 does it: no more is written."""


class DyingWriter(MemoryWriter):
    """Dies before its n-th record of a topic, and writes nothing from then on."""

    def __init__(self, bus: MemoryBus, topic: Topic, after: int) -> None:
        super().__init__(bus)
        self._topic, self._left = topic, after

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> None:
        self._left -= topic == self._topic
        if self._left < 0:
            raise Killed
        super().send(topic, value, key=key, partition=partition)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are published here; these are what made the samples."""
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("infra.tail._POLL_S", "producers.sample_feed._POLL_S", "producers.feeder._POLL_S",
                 "producers.ranking._POLL_S"):  # fmt: skip
        monkeypatch.setattr(name, 0.01)
    monkeypatch.setattr("producers.snapshots._LEAST_S", 0.0)
    monkeypatch.setattr("producers.dispatch.service._TICK_S", 0.01)
    monkeypatch.setattr("infra.stores.file_store.os.fsync", lambda number: None)


def spec_of(**algorithm: Any) -> RunSpec:
    return make_spec(algorithm={**SYNC, **algorithm}, deadlines={"progress_s": 30})


def on(others: Others, first: int = 0) -> None:
    """The rest of the run plays its part from a version to the end."""
    for version in range(first, others.spec.algorithm.iterations):
        admitted = others.admissible(version)[version * others.spec.algorithm.groups :]
        others.await_groups(group for group in admitted if group not in others.taken)
        others.generate(iteration=version)
        others.train(version)


def calm(spec: RunSpec, folder: Path) -> dict[int, list[Any]]:
    """What is planned if nobody disturbs."""
    others = Others(spec, folder)
    life = Life(others.life())
    on(others)
    life.ended()
    assert life.error is None
    assert len(others.sent()) == spec.algorithm.iterations * spec.algorithm.groups
    return {group: essence(prompt) for group, prompt in others.prompts().items()}


def snapshots_of(others: Others) -> list[str]:
    return others.context.store.list(f"runs/{others.context.run}/feeder")


def lose_snapshots(others: Others, draw: random.Random) -> None:
    """Some were never put, some are damaged."""
    keys = snapshots_of(others)
    count = draw.choice([0, 0, 1, len(keys)])
    for key in keys[len(keys) - count :]:
        if draw.random() < 0.3:
            others.context.store.put(key, others.context.store.get(key)[: draw.randrange(200)])
        else:
            others.context.store.delete(key)


def killed_again_and_again(spec: RunSpec, folder: Path, seed: int) -> Others:
    """A run whose feeder is killed at any of its writes, or while the others are at work."""
    others, draw = Others(spec, folder), random.Random(seed)
    version = 0
    while version < spec.algorithm.iterations:
        context = others.life()
        topic = draw.choice([others.context.topics.prompts, others.context.topics.ranker])
        bus = others.context.bus
        assert isinstance(bus, MemoryBus)
        context.writer = DyingWriter(bus, topic, draw.randrange(12))
        life = Life(context)
        for _ in range(draw.randrange(1, 4)):
            if version < spec.algorithm.iterations:
                groups = set(others.admissible(version))
                wait_until(lambda: groups <= others.prompts().keys() or life.error, what="groups")  # noqa: B023
                if life.error:
                    break
                others.generate(iteration=version)
                if draw.random() < 0.8:
                    others.train(version)
                    version += 1
        if life.error is None:
            context.stop.set()
        life.ended()
        lose_snapshots(others, draw)
    with fed(others):
        others.await_groups(others.admissible(version))
    return others


@pytest.mark.parametrize(
    "algorithm",
    [SYNC, ASYNC, {**SYNC, "optimizer_steps": 2}, ARRIVAL, {**ARRIVAL, "optimizer_steps": 2}],
    ids=["sync", "async", "steps", "arrival", "arrival, steps"],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_feeder_killed_anywhere_plans_the_same(
    tmp_path: Path, algorithm: dict[str, Any], seed: int
) -> None:
    spec = spec_of(**algorithm)
    expected = calm(spec, tmp_path / "calm")
    others = killed_again_and_again(spec, tmp_path / "wild", seed)
    assert {group: essence(prompt) for group, prompt in others.prompts().items()} == expected
    assert all(essence(prompt) == expected[prompt.group] for prompt in others.sent())


@pytest.mark.parametrize("kept", [True, False], ids=["snapshot", "none"])
@pytest.mark.parametrize("lookahead", [0.0, 1.5])
@pytest.mark.parametrize("version", [1, 4])
def test_what_retention_took_is_not_sent_again_but_for_what_is_open(
    tmp_path: Path, version: int, lookahead: float, kept: bool
) -> None:
    """With a snapshot what is open is sent as it was; what is trained is never sent again."""
    spec = spec_of(**({"mode": "async", "staleness": lookahead} if lookahead else {}))
    expected = calm(spec, tmp_path / "calm")
    others = Others(spec, tmp_path / "old")
    with fed(others):
        for number in range(version):
            others.await_groups(others.admissible(number))
            others.generate(iteration=number)
            others.train(number)
        others.await_groups(others.admissible(version))
    bus, topics = others.context.bus, others.context.topics
    assert isinstance(bus, MemoryBus)
    for topic in (topics.prompts, topics.samples, topics.ledger, topics.dead, topics.evals):
        for partition in range(topic.partitions):
            bus.truncate(topic, partition, bus.end(topic, partition))
    others.answered.clear()
    if not kept:
        for key in snapshots_of(others):
            others.context.store.delete(key)
        # what the ledger does not say any more the newest weights do
        others.context.store.put(f"runs/test-1/weights/v{version:06d}/manifest.json", b"{}")
    with fed(others):
        trained = version * spec.algorithm.groups
        others.await_groups(set(others.admissible(version)) - set(range(trained)))
        sent = others.sent()
        assert min(prompt.group for prompt in sent) >= trained
        if kept:
            assert all(essence(prompt) == expected[prompt.group] for prompt in sent)
            on(others, version)
            assert {prompt.group: essence(prompt) for prompt in others.sent()} == {
                group: essence_ for group, essence_ in expected.items() if group >= trained
            }


def test_what_retention_took_of_groups_that_came_late_is_sent_again(tmp_path: Path) -> None:
    """With order arrival the number of a group does not say whether it is trained: the snapshot does."""
    spec = spec_of(**ARRIVAL)
    expected = calm(spec, tmp_path / "calm")
    others = Others(spec, tmp_path / "old")
    with fed(others):
        for number in range(3):
            others.await_groups(others.admissible(number))
            others.generate()
            others.train(number)
        others.await_groups(others.admissible(3))
    late = {group for group in others.admissible(3) if group not in others.taken}
    assert min(late) < 3 * spec.algorithm.groups  # else this would show nothing
    bus, topics = others.context.bus, others.context.topics
    assert isinstance(bus, MemoryBus)
    for topic in (topics.prompts, topics.samples, topics.ledger):
        for partition in range(topic.partitions):
            bus.truncate(topic, partition, bus.end(topic, partition))
    others.answered.clear()
    with fed(others):
        others.await_groups(late)
        assert others.prompts().keys() == late
        on(others, 3)
    assert all(essence(prompt) == expected[prompt.group] for prompt in others.sent())


@pytest.mark.parametrize("without", ["ledger", "prompts"])
def test_a_lost_head_sends_nothing_again(tmp_path: Path, without: str) -> None:
    """Of a run made before there were snapshots, whose ledger or prompts have lost their first records."""
    spec = spec_of()
    others = Others(spec, tmp_path)
    with fed(others):
        for number in range(3):
            others.await_groups(others.admissible(number))
            others.generate(iteration=number)
            others.train(number)
        others.await_groups(others.admissible(3))
    for key in snapshots_of(others):
        others.context.store.delete(key)
    before, bus, topics = len(others.sent()), others.context.bus, others.context.topics
    assert isinstance(bus, MemoryBus)
    kept = before
    if without == "ledger":
        bus.truncate(topics.ledger, 0, 1)
    else:
        for partition, log in enumerate(bus.log(topics.prompts)):
            head = [record for record in log if decode(record.value, Prompt).iteration == 0]
            bus.truncate(topics.prompts, partition, len(head))
            kept -= len(head)
    with fed(others):
        others.generate(iteration=3)
        others.train(3)
        others.await_groups(range(16, 20))
        assert len(others.sent()) == kept + 4


def test_two_feeders_at_once(tmp_path: Path) -> None:
    """The older one ends and says which replaced it; what both sent is the same."""
    spec = spec_of()
    expected = calm(spec, tmp_path / "calm")
    others = Others(spec, tmp_path / "two")
    first = Life(others.life())
    others.await_groups(range(4))
    second = Life(others.life())
    on(others)
    first.ended()
    second.ended()
    assert second.error is None
    assert isinstance(first.error, Replaced)
    assert "start 1 of the feeder" in str(first.error) and "(start 0)" in str(first.error)
    assert {group: essence(prompt) for group, prompt in others.prompts().items()} == expected
    assert all(essence(prompt) == expected[prompt.group] for prompt in others.sent())
    assert (first.context.feeder_epoch, second.context.feeder_epoch) == (0, 1)


def test_garbage_on_any_topic_ends_no_feeder(tmp_path: Path) -> None:
    spec = make_spec(algorithm=SYNC, evaluation={"problems": 3})
    others = Others(spec, tmp_path)
    topics, writer = others.context.topics, others.context.writer
    for topic in (topics.prompts, topics.evals, topics.ledger, topics.samples, topics.dead):
        writer.send(topic, b"garbage", key="0000000-00")
        foreign = make_step(spec, 0, [], run="other-1")
        writer.send(topic, encode(foreign), key="0")
    with fed(others, HELD_OUT):
        others.await_groups([-1, -2, -3])
        others.generate("eval")
        others.await_groups(range(4))
    places = sorted((letter.topic, letter.offset) for letter in others.letters())
    assert places == sorted((topic.name, at) for topic in (topics.prompts, topics.evals) for at in (0, 1))
    with fed(others, HELD_OUT):  # once each, however often it starts
        others.generate()
        others.train(0)
        others.await_groups(range(8))
    assert len(others.letters()) == 4


def test_an_unreadable_step_stops_the_feeder_until_it_is_skipped(tmp_path: Path) -> None:
    others = Others(spec_of(), tmp_path)
    topics = others.context.topics
    life = Life(others.life())
    others.await_groups(range(4))
    others.context.writer.send(topics.ledger, b"garbage", key="0")
    life.ended()
    assert isinstance(life.error, BadStep)
    assert "streamrl skip test-1 'test-1.ledger[0]@0'" in str(life.error)
    with pytest.raises(BadStep):  # it comes back until somebody decides
        Life(others.life())
    add_skipped(others.context.store, "test-1", (topics.ledger.name, 0, 0), "garbage")
    others.generate()
    others.train(0)
    with fed(others):
        others.await_groups(range(8))


def test_a_snapshot_that_does_not_go_with_the_log_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of()
    others = Others(spec, tmp_path)
    with fed(others):
        for number in range(2):
            others.await_groups(others.admissible(number))
            others.generate(iteration=number)
            others.train(number)
        others.await_groups(others.admissible(2))
    assert len(snapshots_of(others)) == 3
    new = Others(spec, tmp_path / "new", None)
    for key in snapshots_of(others):  # of a log that is not there any more
        new.context.store.put(key, others.context.store.get(key))
    with fed(new):
        new.await_groups(range(4))
    assert "is newer than test-1." in caplog.text
    assert caplog.text.count("an older one stands in") >= 2


def test_a_start_reads_no_topic_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # dispatch by deadline reads the newest steps for their lengths: more than this run has
    simple = make_spec(dispatch={"policy": "longest_first"}).dispatch
    spec = spec_of(iterations=12).model_copy(update={"dispatch": simple})
    others = Others(spec, tmp_path)
    with fed(others):
        for number in range(10):
            others.await_groups(others.admissible(number))
            others.generate(iteration=number)
            others.train(number)
        others.await_groups(others.admissible(10))
    read: dict[str, int] = {}
    plain: Callable[..., Any] = MemoryBus.slice

    def counted(bus: MemoryBus, topic: Topic, partition: int, position: int, most: int) -> Any:
        found = plain(bus, topic, partition, position, most)
        read[topic.name.partition(".")[2]] = read.get(topic.name.partition(".")[2], 0) + len(found)
        return found

    life = None
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBus, "slice", counted)
        life = Life(others.life())
        counts = dict(read)
    life.end()
    assert counts["prompts"] == 4 and counts["ledger"] <= 2 and counts["samples"] <= 8 * 3, counts


def test_what_was_announced_is_not_announced_again(tmp_path: Path) -> None:
    spec = spec_of()
    others = Others(spec, tmp_path)
    with fed(others):
        others.await_groups(range(4))
        others.generate()
        others.train(0)
        others.await_groups(range(8))

    def announced() -> int:
        records = read_all(others.context.bus, others.context.topics.ranker, deadline_s=5)
        return len([decode(record.value, RankerAnnouncement) for record in records])

    before = announced()
    bus, topic = others.context.bus, others.context.topics.prompts
    assert isinstance(bus, MemoryBus)
    for partition in range(topic.partitions):
        bus.truncate(topic, partition, bus.end(topic, partition))
    with fed(others):
        others.await_groups(range(4, 8))
        assert announced() == before
