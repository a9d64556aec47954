"""Two trainers of one run at once: whatever they do, it goes on and trains each sample once."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers.steps.checkpoint import Checkpoints
from consumers.steps.ledger import Ledger
from consumers.steps.publisher import Publisher
from consumers.stream.sample_stream import CAME_BEFORE, SampleStream
from consumers.trainer import Trainer
from infra.bus import read_all
from infra.epochs import Replaced
from infra.errors import Explained
from schemas.messages import DeadLetter, StepRecord
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.fakes.crashing import AFTER, Crash, Life, World, hurry
from tests.fakes.fill import fill
from tests.waiting import wait_until

_PATIENCE_S = 0.4  # for the other one, which may have ended


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    hurry(monkeypatch, model, make_spec())
    monkeypatch.setattr("consumers.trainer._FENCE_S", 0.05)
    monkeypatch.setattr("infra.stores.file_store.os.fsync", lambda number: None)


class Said(logging.Handler):
    """What trainers warn of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Twins:
    """Two lives; each stands still at some of its writes until the other one has done so many, and dies."""

    def __init__(self, world: World, pauses: list[dict[int, int]], most: list[int]) -> None:
        self._world, self._pauses, self._most, self._done = world, pauses, most, [0, 0]
        self._changed = threading.Condition()
        self.ended: list[str] = ["", ""]

    def _before(self, which: int) -> Callable[[int], None]:
        def wait(number: int) -> None:
            other = 1 - which
            with self._changed:
                self._done[which] = number
                self._changed.notify_all()
                enough = self._done[other] + self._pauses[which].get(number, 0)
                self._changed.wait_for(lambda: self._done[other] >= enough, _PATIENCE_S)

        return wait

    def live(self, which: int) -> None:
        try:
            self._world.live(before=self._before(which), most=self._most[which])
            self.ended[which] = "done"
        except Explained as error:
            self.ended[which] = str(error)
        finally:
            with self._changed:
                self._done[which] = 1 << 30
                self._changed.notify_all()

    def run(self) -> None:
        threads = [threading.Thread(target=self.live, args=(which,), daemon=True) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()


def letters(world: World) -> list[DeadLetter]:
    records = read_all(world.context.bus, world.context.topics.dead, deadline_s=5)
    return [decode(record.value, DeadLetter) for record in records]


MOST = st.integers(5, 90)  # writes that each of them lives for
PAUSES = st.dictionaries(st.integers(0, 50), st.integers(1, 30), max_size=5)


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"optimizer_steps": 2}, {"mode": "async", "staleness": 1}],
    ids=["sync", "several steps", "async"],
)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(pauses=st.tuples(PAUSES, PAUSES), most=st.tuples(MOST, MOST), seed=st.integers(0, 99))
def test_whatever_they_do_the_next_one_goes_on(
    tmp_path_factory: pytest.TempPathFactory, model: str, algorithm: dict[str, Any],
    pauses: tuple[dict[int, int], dict[int, int]], most: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    spec = make_spec(
        algorithm={"iterations": 4, "groups": 2, "group_size": 2, "learning_rate": 1e-2} | algorithm,
        trainer={"checkpoint_every": 1, "keep_checkpoints": 2, "keep_weights": 4},
    )
    world = World(make_context(spec, tmp_path_factory.mktemp("world")), model, seed)
    twins, said = Twins(world, list(pauses), list(most)), Said()
    world.context.log.addHandler(said)
    twins.run()
    for ended in twins.ended:
        assert ended == "done" or "replaced" in ended or "another trainer" in ended or "newer start" in ended
    world.live()
    world.context.log.removeHandler(said)
    world.outcome(twins=True)
    assert not [text for text in said.texts if "can't be taken again" in text]  # no step was given up
    assert [letter.reason for letter in letters(world) if CAME_BEFORE not in letter.reason] == []


def test_the_older_one_ends_before_it_writes(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(algorithm={"iterations": 2, "groups": 2, "group_size": 2})
    world = World(make_context(spec, tmp_path), model)
    collect, others = Trainer._collect, list[int]()

    def slow(self: Trainer, *args: Any) -> Any:
        step = collect(self, *args)
        if not others:
            others.append(1)
            world.live()  # all of it, while the older one stands still in its first step
        return step

    monkeypatch.setattr(Trainer, "_collect", slow)
    with pytest.raises(Replaced, match=r"start 1 of the trainer \(process \d+ on .*\) has replaced this one"):
        world.live()
    assert {step.trainer_epoch for step in world.ledger()} == {1}
    world.outcome()


def test_what_another_one_publishes_meanwhile_is_in_the_ledger(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions that stand are no sign of a gap if their steps were written after the ledger was read."""
    spec = make_spec(algorithm={"iterations": 3, "groups": 2, "group_size": 2})
    world = World(make_context(spec, tmp_path), model)
    newest, others = Publisher.newest, list[Life]()

    def late(self: Publisher) -> int:
        if not others:
            others.append(Life(Crash(), threading.Event(), world.context.heart))
            world.live()
        return newest(self)

    monkeypatch.setattr(Publisher, "newest", late)
    world.live()
    assert "can't be taken again" not in caplog.text
    world.outcome()


def test_a_position_never_passes_a_later_step(tmp_path: Path) -> None:
    """Ledger A11, A12, B11: what B's checkpoint stores must not hide A's 12."""
    context = make_context(make_spec(), tmp_path)

    def step(number: int, epoch: int) -> StepRecord:
        return fill(
            StepRecord, run=context.run, step=number, root_out=f"r{number}", trainer_epoch=epoch,
            iteration=number, last_of_iteration=True, version_in=number, version_out=number + 1,
            predicted=np.zeros(0),
        )  # fmt: skip

    old, new = Ledger(context, 0), Ledger(context, 1)
    for ledger in (old, new):
        assert ledger.rest(0) == []
    old.append(step(0, 0))
    old.append(step(1, 0))
    new.append(step(0, 1))
    assert new.position(1) == 1
    standing = new.standing(1)
    assert standing is not None and (standing.step, standing.trainer_epoch) == (1, 0)
    third = Ledger(context, 2)
    assert [one.step for one in third.rest(new.position(1), 1)] == [1]
    # a run whose checkpoint stored a position that is too far, as older versions did, is found out of it
    assert [one.step for one in Ledger(context, 3).rest(3, 1)] == []
    old_position = Ledger(context, 3)
    new.append(step(1, 1))
    new.append(step(2, 1))
    assert [one.step for one in old_position.rest(4, 1)] == [1, 2]


def test_the_one_behind_keeps_valid_samples(tmp_path: Path) -> None:
    """Of weights newer than its own: they wait until it has come to them, or hears that it was replaced."""
    spec = make_spec(algorithm={"groups": 2, "group_size": 2, "mode": "async", "staleness": 1})
    context = make_context(spec, tmp_path)
    roots = {0: "r", 1: "s"}
    asked: list[int] = []
    stream = SampleStream(context, 24, {}, (0, 0), roots.get, fence=lambda: asked.append(1)).open()
    samples = [
        make_sample(spec, 3, 0, versions=np.array([1], np.int32), roots=["s"]),
        make_sample(spec, 3, 1, versions=np.array([1], np.int32), roots=["false"]),
        make_sample(spec, 2, 0, versions=np.array([0], np.int32)),
    ]
    for sample in samples:
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    wait_until(lambda: stream.pump(0.01) + 1 and stream.positions[0] == 3, what="the samples")
    found = read_all(context.bus, context.topics.dead, deadline_s=5)
    assert [decode(one.value, DeadLetter).reason for one in found] == [
        "weights 1 made it; the run's newest are 0"
    ]
    assert stream.received == 1 and asked == [1]
    assert stream.low_watermarks()[0] == 0
    stream.trained((0, 0))
    assert stream.received == 2
    stream.close()


def test_a_killed_one_and_a_late_one(tmp_path: Path, model: str) -> None:
    """Started again and again while an older one is still there: each newer one goes on."""
    spec = make_spec(
        algorithm={"iterations": 5, "groups": 2, "group_size": 2, "learning_rate": 1e-2},
        trainer={"checkpoint_every": 2, "keep_checkpoints": 1, "keep_weights": 4},
    )
    world, draw, lives = World(make_context(spec, tmp_path), model), random.Random(5), list[Life]()

    def slow(number: int) -> None:
        time.sleep(draw.random() * 0.01)

    def late() -> None:
        with suppress(Explained):
            lives.append(world.live(before=slow))

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    for number in range(1, 4):
        with suppress(Explained):
            world.live(Crash(f"send test-1.ledger {number} 1", AFTER))
    thread.join(300)
    assert not thread.is_alive()
    world.live()
    world.outcome(twins=True)
    assert Checkpoints(world.context.store, "test-1").latest(print) is not None
