"""A whole generator in a thread, on the bus in memory: what several tests look at it through."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from infra.bus import read_all
from infra.process import Context
from infra.weights.versions import WeightStore
from producers.engines.base import Engine
from producers.generator import Generator
from producers.rewards import Score
from schemas.messages import Assignment, InstanceReport, Prompt, WeightsAnnouncement
from schemas.topics import assignment_partition
from schemas.wire import decode, encode
from tests.waiting import wait_until


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

    def __init__(self, context: Context, engine: Engine, bell: threading.Event) -> None:
        self.context, self.engine, self.rewards = context, engine, Rewards()
        generator = Generator(context, engine, self.rewards, lambda tokens: "", bell)
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
        self._send(
            **({"start": start} if start else {}), prompts=[encode(one) for one in prompts],
            indexes=[[0, 1] for _ in prompts], withdrawn=list(withdrawn),
        )  # fmt: skip

    def _send(self, **fields: Any) -> None:
        context = self.context
        wait_until(lambda: self.read("instances", InstanceReport), what="its first report")
        start = self.read("instances", InstanceReport)[0].start
        values: dict[str, Any] = {"start": start, "prompts": [], "indexes": [], "withdrawn": [], "moving": []}
        assignment = Assignment(
            run=context.run, instance=context.name, parts=[], sent_at=0.0, **(values | fields)
        )
        context.writer.send(
            context.topics.assignments, encode(assignment), key=context.name,
            partition=assignment_partition(context.name),
        )  # fmt: skip

    def move(self, *names: str) -> None:
        """Others shall go on with these."""
        self._send(moving=list(names))

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
