"""A world in memory in which a trainer dies at a chosen write, as by kill -9: before it, after it, half way.

Samples are there as soon as their weights are announced, in any order and some of them twice, so that a run
takes milliseconds. What survives a crash is what survives a real one: the log and the store.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from consumers.batches.training_rows import says_nothing
from consumers.learners import forward
from consumers.learners.learner import Learner, TorchLearner
from consumers.steps.checkpoint import Checkpoints
from consumers.trainer import Trainer
from infra.bus import read_all
from infra.memory_bus import MemoryBus, MemoryWriter
from infra.roles.context import RoleContext, Stopped
from infra.roles.heart import Heart
from infra.stores.file_store import FileStore
from infra.weights.versions import WeightStore
from schemas.admission import admissible, iteration_of
from schemas.identity import ROUND, round_of
from schemas.messages import Sample, StepRecord, WeightsAnnouncement
from schemas.runspec import RunSpec
from schemas.topics import Topic
from schemas.wire import decode, encode
from tests.factories import make_sample

BEFORE, TORN, AFTER = "before", "half way", "after"


class Killed(BaseException):
    """kill -9. No `except Exception` survives it."""


@dataclass(frozen=True)
class Crash:
    """At which write of a trainer, and when."""

    write: str = ""
    when: str = BEFORE

    @property
    def certain(self) -> bool:
        """Whether each life writes it. What comes twice is a dead letter only if it comes in time."""
        return ".dead " not in self.write


@dataclass
class Life:
    """From one start of a trainer to its end. A dead one writes nothing more, from no thread."""

    crash: Crash
    stop: threading.Event
    heart: Heart
    writes: list[str] = field(default_factory=list)
    dead: bool = False
    most: int = 1 << 30  # writes; it dies before the next one
    before: Callable[[int], None] = lambda number: None  # called before each write: stands still for a while
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def write(self, what: str, effect: Callable[[], None], half: Callable[[], None] | None = None) -> None:
        """Do what a write does, unless the trainer dies of it."""
        self.before(len(self.writes))
        with self._lock:
            if self.dead:
                raise Killed
            self.writes.append(what)
            name = f"{what} {self.writes.count(what)}"
            if name != self.crash.write and len(self.writes) <= self.most:
                return effect()
            if name == self.crash.write and self.crash.when == TORN and half is not None:
                half()
            if name == self.crash.write and self.crash.when == AFTER:
                with suppress(Exception):
                    effect()
            self.dead = True
            self.stop.set()
            raise Killed


class CrashingStore(FileStore):
    """A folder; half a write leaves a temporary file."""

    def __init__(self, url: str, life: Life) -> None:
        super().__init__(url)
        self._life = life

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        data = b"".join(map(bytes, parts))  # each is written over by the next
        effect = lambda: super(CrashingStore, self).put_parts(key, [data], size)  # noqa: E731
        self._life.write(f"put {key}", effect, self._half(key, data))

    def put_new(self, key: str, data: bytes) -> None:
        effect = lambda: super(CrashingStore, self).put_new(key, data)  # noqa: E731
        self._life.write(f"put {key}", effect, self._half(key, data))

    def delete(self, key: str) -> None:
        self._life.write(f"delete {key}", lambda: super(CrashingStore, self).delete(key))

    def _half(self, key: str, data: bytes) -> Callable[[], None]:
        def write() -> None:
            target = self._root / key
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_name(f".{target.name}.half.tmp").write_bytes(data[: len(data) // 2])

        return write


class CrashingWriter(MemoryWriter):
    """The log; announced weights are answered with samples."""

    def __init__(self, world: World, life: Life) -> None:
        super().__init__(world.log)
        self._world, self._life = world, life

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> None:
        def effect() -> None:
            super(CrashingWriter, self).send(topic, value, key=key, partition=partition)
            if topic.name == self._world.context.topics.weights.name:
                self._world.answer(decode(value, WeightsAnnouncement))

        self._life.write(f"send {topic.name} {key}", effect)

    def flush(self, deadline_s: float) -> None:
        self._life.write(f"flush by {threading.current_thread().name}", lambda: None)


def hurry(monkeypatch: pytest.MonkeyPatch, model: str, spec: RunSpec) -> None:
    """Trainers load the model once for all, and wait for nothing that is there."""
    loaded = forward.load_policy(model, spec, forward.torch.device("cpu"))
    monkeypatch.setattr("consumers.learners.forward.load_policy", lambda *_: copy.deepcopy(loaded))
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)


class World:
    """What is there when no trainer is."""

    def __init__(self, context: RoleContext, model: str, seed: int = 0, log: MemoryBus | None = None) -> None:
        """`log`: to write to, if the context's bus is another one that reads it."""
        self.context, self._seed = context, seed
        self.log: MemoryBus = log or context.bus  # type: ignore[assignment]
        self.edit: Callable[[Sample], Sample] = lambda sample: sample  # as it is made
        self.learner_of: Callable[[], Learner] = lambda: TorchLearner(model, context.spec)
        self._lock = threading.Lock()
        made = read_all(context.bus, context.topics.samples, deadline_s=5)
        self._admitted = max((decode(record.value, Sample).group + 1 for record in made), default=0)

    def answer(self, announced: WeightsAnnouncement) -> None:
        """What generators do."""
        spec, topic = self.context.spec, self.context.topics.samples
        algorithm = spec.algorithm
        if algorithm.mode == "offline":
            return
        until = min(
            admissible(announced.version, algorithm.groups, algorithm.lookahead),
            algorithm.iterations * algorithm.groups,
        )
        versions = np.array([announced.version], dtype=np.int32)
        made_by = {"run": self.context.run, "roots": [announced.root], "versions": versions}
        with self._lock:
            first, self._admitted = self._admitted, max(until, self._admitted)
        samples = [sample for group in range(first, until) for sample in self._group(group, made_by)]
        draw = random.Random(self._seed + announced.version)
        samples += draw.sample(samples, len(samples) // 4)  # delivered twice
        draw.shuffle(samples)
        for sample in samples:
            self.context.writer.send(topic, encode(sample), key=sample.id, partition=sample.length_class)

    def _group(self, group: int, made_by: dict[str, Any]) -> list[Sample]:
        """A group's samples; and those of another one in its place if it tells nothing."""
        spec = self.context.spec
        made = [
            self.edit(make_sample(spec, group, index, **made_by))
            for index in range(spec.algorithm.group_size)
        ]
        if round_of(group) < spec.loss.most_draws and says_nothing(made):
            return made + self._group(group + ROUND, made_by)
        return made

    def live(
        self, crash: Crash | None = None, tamper: Callable[[Any], None] | None = None,
        before: Callable[[int], None] = lambda number: None, most: int = 1 << 30,
    ) -> Life:  # fmt: skip
        """A trainer starts, and works until the end or its death."""
        stop = threading.Event()
        heart = Heart(self.context.run, "trainer", 0)
        life = Life(crash or Crash(), stop, heart, most=most, before=before)
        store = CrashingStore(self.context.store.url, life)
        context = replace(
            self.context, store=store, writer=CrashingWriter(self, life), stop=stop,
            heart=life.heart,
        )  # fmt: skip
        learner = self.learner_of()
        if tamper is not None:
            tamper(learner)
        with suppress(Killed, Stopped):
            Trainer(context, learner).run()
        return life

    def ledger(self) -> list[StepRecord]:
        """All records."""
        context = self.context
        records = read_all(context.bus, context.topics.ledger, deadline_s=5)
        return [decode(record.value, StepRecord) for record in records]

    def outcome(self, *, twins: bool = False) -> list[tuple[int, frozenset[tuple[int, int]], str]]:
        """Of each step its number, its samples and its root; checks all that must hold of any run.

        `twins`: there were two trainers at once, and of each step the first record counts.
        """
        context, algorithm = self.context, self.context.spec.algorithm
        steps = self.ledger()
        if twins:
            first: dict[int, StepRecord] = {}
            for step in steps:
                first.setdefault(step.step, step)
            steps = list(first.values())
        assert [step.step for step in steps] == list(range(algorithm.iterations * algorithm.optimizer_steps))
        found = []
        for step in steps:
            pairs = list(zip(step.groups.tolist(), step.indexes.tolist(), strict=True))
            assert len(set(pairs)) == len(pairs), "a sample is in a step twice"
            found.append((step.step, frozenset(pairs), step.root_out))
        if algorithm.mode != "offline":
            made = read_all(context.bus, context.topics.samples, deadline_s=5)
            samples = [decode(record.value, Sample) for record in made]
            ids = {(sample.group, sample.index) for sample in samples}
            fresh = [
                (group, index) for step, pairs, _ in found for group, index in pairs
                if iteration_of(group, algorithm.groups) == step // algorithm.optimizer_steps  # not replayed
            ]  # fmt: skip
            assert sorted(fresh) == sorted(ids)
            assert len(ids) >= algorithm.iterations * algorithm.groups * algorithm.group_size
        roots = {step.version_out: step.root_out for step in steps if step.last_of_iteration}
        announced = [
            decode(record.value, WeightsAnnouncement)
            for record in read_all(context.bus, context.topics.weights, deadline_s=5)
        ]
        assert {one.version for one in announced} == set(range(algorithm.iterations + 1))
        assert all(one.root == roots.get(one.version, one.root) for one in announced)
        weights = WeightStore(context.store, context.run)
        assert weights.fetch(algorithm.iterations, root=steps[-1].root_out)
        last = Checkpoints(context.store, context.run).latest(print)
        assert last is not None
        assert (last[0].iteration, last[0].root) == (algorithm.iterations, steps[-1].root_out)
        return found


def crashes_of(writes: list[str]) -> list[Crash]:
    """Every crash that a life with these writes may end with. Before one is after the one before."""
    names = [f"{what} {writes[: number + 1].count(what)}" for number, what in enumerate(writes)]
    found = [Crash(names[0], BEFORE)]
    for what, name in zip(writes, names, strict=True):
        found += [Crash(name, when) for when in ((TORN, AFTER) if what.startswith("put") else (AFTER,))]
    return found
