"""A whole generator in a thread, on the bus in memory: what several tests look at it through."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from infra.bus import read_all
from infra.roles.context import RoleContext
from infra.roles.turns import engines_turn
from infra.weights.versions import WeightStore
from producers.dispatch.assigning import assignments, question
from producers.dispatch.jobs import Placed, RecordPlace, SampleJob
from producers.engines.engine import Engine
from producers.generator import Generator
from producers.rewards import RewardOutcome
from schemas.identity import sample_key
from schemas.messages import Assignment, GeneratorReport, Prompt, WeightsAnnouncement
from schemas.topics import assignment_partition
from schemas.wire import decode, encode
from tests.waiting import wait_until


class Rewards:
    """One for each, or an error for what is called bad."""

    def __init__(self) -> None:
        self.scores: list[RewardOutcome] = []
        self.closed = False

    def score(self, key: str, problem: str, completion: str) -> None:
        error = "it is bad" if "bad" in problem else ""
        self.scores.append(RewardOutcome(key, {} if error else {"one": 1.0}, error))

    def pending(self) -> int:
        return 0

    def poll(self) -> list[RewardOutcome]:
        scores, self.scores = self.scores, []
        return scores

    def close(self) -> None:
        self.closed = True


class Running:
    """A generator in a thread, and the log around it."""

    def __init__(self, context: RoleContext, engine: Engine, bell: threading.Event) -> None:
        self.context, self.engine, self.rewards = context, engine, Rewards()
        turn = engines_turn(context)
        generator = Generator(context, engine, self.rewards, lambda tokens: "", bell, turn).open()
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
        self._thread.join(timeout=100)
        assert not self._thread.is_alive()

    def read(self, topic: str, kind: Any) -> list[Any]:
        found = read_all(self.context.bus, getattr(self.context.topics, topic), deadline_s=5)
        return [decode(record.value, kind) for record in found]

    def assign(self, *prompts: Prompt, start: str | None = None, withdrawn: tuple[str, ...] = ()) -> None:
        """Both samples of each prompt, which is put on the log."""
        jobs = [
            SampleJob(one.prompt, index, place=one.place)
            for one in map(self.place, prompts)
            for index in (0, 1)
        ]
        self._send(jobs, start=start, withdrawn=withdrawn)

    def place(self, prompt: Prompt) -> Placed:
        """Put a prompt on the log."""
        context = self.context
        sent = context.writer.send(context.topics.prompts, encode(prompt), key=str(prompt.group))
        return Placed(prompt, RecordPlace(0, sent.offset()))

    def _send(
        self, jobs: list[SampleJob], *, start: str | None = None, withdrawn: tuple[str, ...] = (),
        moving: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        name = self.context.name
        process = (name, start or self.start)
        keys = [sample_key(one) for one in withdrawn], [sample_key(one) for one in moving]
        for message in assignments(self.context.run, process, jobs, *keys):
            self.send(message)

    def send(self, assignment: Assignment) -> None:
        """As the dispatcher does."""
        topic, name = self.context.topics.assignments, self.context.name
        self.context.writer.send(
            topic, encode(assignment), key=assignment.generator, partition=assignment_partition(name)
        )

    @property
    def start(self) -> str:
        """Of its process, as it says itself."""
        wait_until(lambda: self.read("generators", GeneratorReport), what="its first report")
        return str(self.read("generators", GeneratorReport)[0].start)

    @property
    def last_whole(self) -> GeneratorReport:
        """What it said when it last said all."""
        reports: list[GeneratorReport] = self.read("generators", GeneratorReport)
        return [report for report in reports if report.whole][-1]

    def ask(self) -> None:
        """For all that it has."""
        self.send(question(self.context.run))

    def move(self, *names: str) -> None:
        """Others shall go on with these."""
        self._send([], moving=names)

    def announce(self, version: int, tensors: Mapping[str, torch.Tensor] | None = None) -> str:
        weights = WeightStore(self.context.store, self.context.run)
        tensors = tensors or {"w": torch.full((2,), float(version))}
        manifest = weights.publish(version, tensors, trainer_epoch=1)
        message = WeightsAnnouncement(
            run=self.context.run, version=version, root=manifest.root, manifest="", size=manifest.size,
            trainer_epoch=1, announced_at=time.time(),
        )  # fmt: skip
        self.context.writer.send(self.context.topics.weights, encode(message), key="newest")
        return manifest.root
