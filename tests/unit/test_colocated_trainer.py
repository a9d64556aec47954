"""A colocated trainer: it computes when all samples of the iteration are there, while no engine draws."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from consumers.batches.micro_batches import MicroBatch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from consumers.losses.loss import Needs
from consumers.losses.objective import LossStats
from consumers.trainer import Trainer
from infra.bus import read_all
from infra.roles.turns import EnginesLocks
from schemas.messages import Sample, StepRecord, WeightsAnnouncement
from schemas.runspec import RunSpec
from schemas.wire import decode, encode
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.waiting import wait_until


class Computing(TorchLearner):
    """Calls `hook` whenever it computes."""

    hook: Any = None

    def score(self, parts: Sequence[Sequence[TrainingRow]], needs: Needs) -> list[list[TrainingRow]]:
        self.hook("scores")
        return super().score(parts, needs)

    def accumulate(self, batches: Sequence[MicroBatch]) -> list[LossStats]:
        self.hook("trains")
        return super().accumulate(batches)

    def rest(self) -> None:
        self.hook("rests")
        super().rest()


class World:
    """A trainer in a thread, one engine's side of the turn, and samples that the test sends."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.context = make_context(spec, folder)
        learner = Computing(str(make_tiny_model(Path(self.context.record.model))), spec)
        learner.hook = self._computes
        self.engine = EnginesLocks(self.context)
        self.did: list[str] = []
        self.overlaps = 0
        self.rests = 0
        self.ended: list[BaseException] = []
        self._trainer = Trainer(self.context, learner)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._trainer.run()
        except BaseException as error:
            self.ended.append(error)

    def _computes(self, what: str) -> None:
        self.did.append(what)
        self.overlaps += what != "rests" and self.engine._mine

    def draws(self) -> bool:
        """Whether the engine may draw; if not, it rests."""

        def rest() -> None:
            self.rests += 1

        return self.engine.mine(may_rest=True, rest=rest)

    def root(self, version: int) -> str:
        def found() -> list[WeightsAnnouncement]:
            records = read_all(self.context.bus, self.context.topics.weights, deadline_s=5)
            return [decode(record.value, WeightsAnnouncement) for record in records]

        def is_there() -> bool:
            assert not self.ended, self.ended
            return any(one.version == version for one in found())

        wait_until(is_there, what=f"version {version}", deadline_s=60)
        return next(one.root for one in found() if one.version == version)

    def send(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self.context.writer.send(
                self.context.topics.samples, encode(sample), key=sample.id, partition=sample.length_class
            )

    def steps(self) -> int:
        records = read_all(self.context.bus, self.context.topics.ledger, deadline_s=5)
        return len([decode(record.value, StepRecord) for record in records])

    def stop(self) -> None:
        self.context.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path / "home"))
    spec = make_spec(
        placement={"kind": "colocated"}, loss={"kl": 0.1},
        algorithm={"iterations": 2, "groups": 4, "group_size": 2, "optimizer_steps": 2},
    )  # fmt: skip
    made = World(spec, tmp_path)
    yield made
    made.stop()


def of_iteration(world: World, number: int) -> list[Sample]:
    root = world.root(number)
    pairs = [(number * 4 + group, index) for group in range(4) for index in (0, 1)]
    return [make_sample(world.context.spec, *pair, roots=[root]) for pair in pairs]


def test_it_computes_when_all_samples_are_there_and_the_engine_rests(world: World) -> None:
    samples = of_iteration(world, 0)
    assert world.draws()
    world.send(samples[:-1])  # all of the first optimizer step, and three quarters of the second
    wait_until(lambda: world.context.heart.message().waits_for.startswith("1 sample"), what="the last sample")
    assert world.draws() and not set(world.did) - {"rests"}, "it may not even score yet"
    world.send(samples[-1:])
    wait_until(lambda: not world.draws(), what="the learner's turn")
    wait_until(lambda: world.steps() == 2, what="both optimizer steps")
    wait_until(world.draws, what="the engine's turn")
    assert world.rests == 1 and world.overlaps == 0, "both steps are one turn"
    assert {"scores", "trains"} <= set(world.did) and world.did[-1] == "rests"
    world.send(of_iteration(world, 1))
    wait_until(lambda: not world.draws(), what="the learner's second turn")
    wait_until(lambda: world.steps() == 4, what="the last step")
    wait_until(world.draws, what="the engine's turn: the last version is evaluated")
    assert world.overlaps == 0
