"""A feeder of 100,000 iterations: its memory stays as it was, and it starts again in seconds."""

from __future__ import annotations

import gc
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from infra.bus import clamp
from infra.memory_bus import MemoryBus
from producers.feeder import Feeder
from producers.ranker.ranker import Question
from schemas.wire import encode
from tests.factories import make_sample, make_spec
from tests.feeding import HELD_OUT, PROBLEMS, Others, answer, make_step

ITERATIONS = 100_000
EVERY = 1000
SPEC = make_spec(
    algorithm={"iterations": ITERATIONS, "groups": 1, "group_size": 2, "mode": "async", "staleness": 1},
    evaluation={"problems": 3, "every": EVERY}, loss={"kind": "dapo", "resample": 1},
)  # fmt: skip


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are published here; these are what made the samples."""
    monkeypatch.setattr("producers.sample_feed.FeederRoots._published", lambda self, version: "r")


class Ranks:
    """In place of the ranker: learning is tested by itself."""

    begins = ITERATIONS

    def __init__(self, *args: Any, **options: Any) -> None:
        self._version = 0
        self.scores: dict[int, Any] = {}

    def open(self) -> Ranks:
        return self

    name = property(lambda self: f"x/{self._version // 100}")

    def at(self, version: int) -> Ranks:
        self._version = version
        return self

    def predict(self, questions: list[Question]) -> np.ndarray:
        return np.array([3.0 + question.key % 7 + self._version % 5 for question in questions])

    def key(self, version: int) -> str:
        return f"v{version}"

    def nothing(self, *args: Any) -> None:
        """Nothing to do."""

    trained = reached = close = nothing


class Dispatches(Ranks):
    """In place of the dispatcher."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._samples = args[3]

    def admit(self, *args: Any) -> None:
        self._samples.take()

    check = Ranks.nothing


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.feeder.Ranking", Ranks)
    monkeypatch.setattr("producers.feeder.Dispatching", Dispatches)
    monkeypatch.setattr("producers.sample_feed.SampleFeed.follow", lambda feed: None)
    monkeypatch.setattr("infra.stores.file_store.os.fsync", lambda number: None)
    monkeypatch.setattr("infra.epochs.Epoch.check", lambda epoch: None)  # lists a folder
    monkeypatch.setattr("producers.snapshots._LEAST_S", 0.05)


def held(feeder: Feeder) -> int:
    """How many objects it holds, but for those of others."""
    context = feeder._context
    others = (context, context.bus, context.topics, context.spec, context.store, PROBLEMS, HELD_OUT)
    skipped = {id(one) for one in others}
    foreign = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, MemoryBus)
    seen: set[int] = set()
    left: list[Any] = [feeder]
    while left:
        one = left.pop()
        if id(one) in seen or id(one) in skipped or isinstance(one, foreign):
            continue
        seen.add(id(one))
        left += gc.get_referents(one)
    return len(seen)


@pytest.mark.thorough
def test_memory_and_restart_are_flat(tmp_path: Path) -> None:
    others = Others(SPEC, tmp_path)
    bus, topics = others.context.bus, others.context.topics
    assert isinstance(bus, MemoryBus)
    feeder = Feeder(others.life(), PROBLEMS, HELD_OUT, lambda text: [4, 5]).open()
    feeder._begin_iteration(0)
    others.generate("eval")
    rows = [make_sample(SPEC, 0, number, length=3) for number in range(2)]
    first = make_step(SPEC, 0, rows, root_out="r")
    sizes = []
    for iteration in range(ITERATIONS - 1):
        step = structs.replace(
            first, iteration=iteration, step=iteration, version_in=iteration, version_out=iteration + 1,
            groups=first.groups + iteration, offsets=first.offsets + 2 * iteration,
        )  # fmt: skip
        bus.append(topics.ledger, 0, b"", encode(step))
        bus.truncate(topics.samples, 0, 2 * iteration + 2)  # as if they had been there
        taken = feeder._steps.next(0.0)
        assert taken is not None and feeder._take(taken)
        feeder._begin_iteration(iteration + 1)
        if (iteration + 1) % EVERY == 0:
            answer_evaluation(others, feeder)
            for topic in (topics.prompts, topics.evals):  # retention
                for partition in range(topic.partitions):
                    bus.truncate(topic, partition, bus.end(topic, partition) - 40)
        if iteration + 2 in (5 * EVERY, ITERATIONS):
            sizes.append(held(feeder))
    assert sizes[1] < 1.1 * sizes[0], sizes
    feeder._keeper.close()
    assert len(others.context.store.list("runs/test-1/feeder")) == 3
    began = time.monotonic()
    again = Feeder(others.life(), PROBLEMS, HELD_OUT, lambda text: [4, 5]).open()
    again._catch_up()
    assert time.monotonic() - began < 5
    assert again._planner.state() == feeder._planner.state()
    assert held(again) < 1.1 * sizes[0]


def answer_evaluation(others: Others, feeder: Feeder) -> None:
    for one in list(feeder._evaluations.open.values()):
        for prompt in one.prompts:
            others.publish(answer(SPEC, prompt, 0))
    clamp(feeder._feed._reader)
    feeder._feed.read_back()
    assert feeder._evaluations.collect() and not feeder._evaluations.open
