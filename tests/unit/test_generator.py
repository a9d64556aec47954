"""A whole generator on the bus in memory: assignments in, samples out, and what it says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.bus import read_all
from infra.process import Context, Stopped
from infra.weights.versions import WeightStore
from producers.engines.base import EngineError, Request
from producers.engines.replay import RealClock, ReplayEngine
from producers.generator import Generator
from producers.rewards import Score
from schemas.messages import Assignment, InstanceReport, Prompt, Sample, WeightsAnnouncement
from schemas.topics import assignment_partition
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

LENGTH, STEP_S = 5, 0.002


class Rewards:
    """One for each, or an error for what is called bad."""

    def __init__(self) -> None:
        self.scores: list[Score] = []
        self.closed = False

    def score(self, key: str, problem: str, completion: str) -> None:
        error = "it is bad" if "bad" in problem else ""
        self.scores.append(Score(key, {} if error else {"one": 1.0}, error))

    def pending(self) -> int:
        return 0

    def poll(self) -> list[Score]:
        scores, self.scores = self.scores, []
        return scores

    def close(self) -> None:
        self.closed = True


class Running:
    """A generator in a thread, and the log around it."""

    def __init__(self, context: Context) -> None:
        self.context, self.rewards, bell = context, Rewards(), threading.Event()
        self.engine = ReplayEngine(np.full(3, STEP_S), lambda request: LENGTH, RealClock(bell))
        generator = Generator(context, self.engine, self.rewards, lambda tokens: "", bell)
        self.ended: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(generator,))
        self._thread.start()

    def _run(self, generator: Generator) -> None:
        try:
            generator.run()
        except BaseException as error:
            self.ended.append(error)

    def stop(self) -> None:
        self.context.stop.set()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def read(self, topic: str, kind: Any) -> list[Any]:
        found = read_all(self.context.bus, getattr(self.context.topics, topic), deadline_s=5)
        return [decode(record.value, kind) for record in found]

    def assign(self, *prompts: Prompt, start: str | None = None, withdrawn: tuple[str, ...] = ()) -> None:
        context = self.context
        wait_until(lambda: self.read("instances", InstanceReport), what="its first report")
        assignment = Assignment(
            run=context.run, instance=context.name,
            start=start or self.read("instances", InstanceReport)[0].start,
            prompts=[encode(one) for one in prompts], indexes=[[0, 1] for _ in prompts],
            withdrawn=list(withdrawn), moving=[], parts=[], sent_at=0.0,
        )  # fmt: skip
        context.writer.send(
            context.topics.assignments, encode(assignment), key=context.name,
            partition=assignment_partition(context.name),
        )  # fmt: skip

    def announce(self, version: int) -> str:
        weights = WeightStore(self.context.store, self.context.run)
        manifest = weights.publish(version, {"w": torch.full((2,), float(version))}, trainer_epoch=1)
        message = WeightsAnnouncement(
            run=self.context.run, version=version, root=manifest.root, manifest="", size=manifest.size,
            trainer_epoch=1, announced_at=time.time(),
        )  # fmt: skip
        self.context.writer.send(self.context.topics.weights, encode(message), key="newest")
        return manifest.root


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Running]]:
    started: list[Running] = []

    def make() -> Running:
        spec = make_spec(generator={"slots": 2})
        started.append(Running(make_context(spec, tmp_path, role="generator")))
        return started[-1]

    yield make
    for one in started:
        one.stop()


def test_makes_what_is_assigned_and_says_which_weights_made_it(start: Callable[[], Running]) -> None:
    running = start()
    running.assign(prompt(0), prompt(1, problem='{"bad": 1}'), start="of a process before")
    running.assign(prompt(0), prompt(1, problem='{"bad": 1}'))
    running.assign(prompt(0))  # a dispatcher that starts anew may give it again
    root = running.announce(0)
    wait_until(lambda: len(running.read("samples", Sample)) >= 4, what="four samples")
    running.stop()
    samples = {(sample.group, sample.index): sample for sample in running.read("samples", Sample)}
    assert len(running.read("samples", Sample)) == len(samples) == 4
    for (group, _), sample in samples.items():
        assert sample.roots == [root] and sample.versions.tolist() == [0]
        assert sample.true_length == LENGTH and sample.generator == running.context.name
        assert sample.reward_error == ("it is bad" if group else "")
        assert sample.reward == 1.0 or group
    assert running.context.heart.counters["failed_rewards"] == 2


def test_reports_what_it_has_gives_back_and_leaves(start: Callable[[], Running]) -> None:
    running = start()
    running.assign(prompt(8), prompt(9))  # of weights that are not there
    names = [f"{group:07d}-{index:02d}" for group in (8, 9) for index in (0, 1)]

    def held() -> set[int]:
        return set(running.read("instances", InstanceReport)[-1].groups.tolist())

    wait_until(lambda: held() == {8, 9}, what="a report of both groups")
    running.assign(withdrawn=(names[2], names[3], "0000077-00"))
    wait_until(lambda: held() == {8}, what="a report without the withdrawn")
    running.stop()
    reports = running.read("instances", InstanceReport)
    assert [name for report in reports for name in report.returned] == names[2:]
    assert (reports[-1].tokens == -1).all() and reports[-1].leaving and not reports[0].leaving
    assert reports[0].batches == [1, 2] and reports[0].version == -1
    assert isinstance(running.ended[0], Stopped) and running.rewards.closed


def test_a_replay_engine_takes_any_weights_that_are_a_safetensors_file() -> None:
    engine = ReplayEngine(np.full(3, STEP_S), lambda request: LENGTH, RealClock(threading.Event()))
    with pytest.raises(EngineError, match="the weights can't be read"):
        engine.install(b"\x02\0\0\0\0\0\0\0[]", recompute=False)
    engine.submit(Request("a", [1], 9, 0, 1.0))
    assert list(engine.unfinished()) == ["a"]


def test_waiting_for_a_replay_engine_ends_with_the_bell() -> None:
    bell = threading.Event()
    engine = ReplayEngine(np.full(3, 1e6), lambda request: LENGTH, RealClock(bell))
    engine.submit(Request("a", [1], 9, 0, 1.0))
    bell.set()
    assert engine.step(1e6) == []
