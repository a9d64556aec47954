"""What tests of the feeder need: prompts, steps of the ledger, and the other processes' side of the log."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from consumers.stream.arrival_order import ArrivalOrder
from infra.bus import read_all
from infra.epochs import Replaced
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext, Stopped
from infra.roles.heart import Heart
from producers.feeder import Feeder
from schemas.admission import latest_iteration, oldest_version
from schemas.messages import TRAIN, DeadLetter, Evaluation, Prompt, Sample, StepRecord
from schemas.runspec import RunSpec
from schemas.taken import TakenGroups
from schemas.topics import Topic
from schemas.wire import MessageT, encode
from tests.factories import make_context, make_sample
from tests.waiting import wait_until

PROBLEMS = [{"id": str(number), "prompt": f"{number}:", "kind": str(number % 5)} for number in range(64)]
HELD_OUT = [{"id": f"h{number}", "prompt": f"{number}:"} for number in range(3)]


def make_prompt(spec: RunSpec, group: int, **fields: Any) -> Prompt:
    """A prompt that `make_sample` answers."""
    algorithm = spec.algorithm
    version = oldest_version(group, algorithm.groups, algorithm.lookahead)
    values: dict[str, Any] = {
        "run": "test-1", "purpose": TRAIN, "group": group, "size": algorithm.group_size,
        "problem_id": str(group), "problem": "{}", "epoch": 0, "tokens": np.array([4, 5], np.int32),
        "iteration": latest_iteration(group, algorithm),
        "mini": group % algorithm.optimizer_steps if algorithm.order == "window" else 0,
        "bundle": group, "bundle_groups": 1, "min_version": version, "predicted": 4.0, "predictor": "x",
        "length_class": group % spec.lengths.classes, "edges": [5.0] * (spec.lengths.classes - 1),
        "admitted_at": 0.0,
    }  # fmt: skip
    return Prompt(**{**values, **fields})


def make_step(
    spec: RunSpec, iteration: int, samples: Sequence[Sample], *, mini: int = 0,
    places: Sequence[tuple[int, int]] | None = None, **fields: Any,
) -> StepRecord:  # fmt: skip
    """What a trainer records of a step that trained these samples."""
    steps = spec.algorithm.optimizer_steps
    last, where = mini + 1 == steps, places or [(0, number) for number in range(len(samples))]
    values: dict[str, Any] = {
        "run": "test-1", "trainer_epoch": 0, "iteration": iteration, "step": iteration * steps + mini,
        "last_of_iteration": last, "version_in": iteration, "version_out": iteration + last, "root_out": "",
        "recipe": "", "partitions": np.array([place[0] for place in where], np.int16),
        "offsets": np.array([place[1] for place in where], np.int64),
        "groups": np.array([sample.group for sample in samples], np.int64),
        "indexes": np.array([sample.index for sample in samples]),
        "lengths": np.array([sample.true_length for sample in samples]),
        "rewards": np.array([sample.reward for sample in samples]),
        "versions": np.array([int(sample.versions[0]) for sample in samples]),
        "predicted": np.array([sample.predicted for sample in samples]),
        "problem_ids": [sample.problem_id for sample in samples],
        "microbatches": np.array([len(samples)]), "losses": np.zeros(1), "metrics": {}, "finished_at": 0.0,
    }  # fmt: skip
    return StepRecord(**{**values, **fields})


def answer(spec: RunSpec, prompt: Prompt, index: int, **fields: Any) -> Sample:
    """A generator's answer to a prompt: always the same."""
    names = ("purpose", "iteration", "mini", "bundle", "bundle_groups", "epoch", "problem_id", "min_version")
    values: dict[str, Any] = {name: getattr(prompt, name) for name in names}
    weights = prompt.iteration if spec.algorithm.mode == "sync" else prompt.min_version
    group = prompt.group if prompt.group >= 0 else 100_000 - prompt.group
    values |= {
        "group": prompt.group, "size": prompt.size, "prompt_tokens": prompt.tokens,
        "versions": np.array([weights], np.int32), "length_class": prompt.length_class,
        "seed": group * 100 + index, "predicted": prompt.predicted, "bundle": prompt.bundle,
    }  # fmt: skip
    sample = make_sample(spec, group, index)
    return type(sample)(
        **{**{name: getattr(sample, name) for name in sample.__struct_fields__}, **values, **fields}
    )


class Others:
    """The rest of a run: who generates, and who trains."""

    def __init__(self, spec: RunSpec, folder: Path, context: RoleContext | None = None) -> None:
        self.spec = spec
        self.context = context or make_context(spec, folder, role="feeder")
        self.answered: set[tuple[int, int]] = set()
        self.taken = TakenGroups(spec.algorithm)

    def life(self) -> RoleContext:
        """A context for one more feeder of the same run."""
        heart = Heart(self.context.run, "feeder", 0)
        return replace(self.context, heart=heart, stop=threading.Event(), writer=self.context.bus.writer())

    def prompts(self) -> dict[int, Prompt]:
        """What stands on the topic, the first of each group."""
        found: dict[int, Prompt] = {}
        for prompt in self.sent():
            found.setdefault(prompt.group, prompt)
        return found

    def sent(self) -> list[Prompt]:
        return self._messages(self.context.topics.prompts, Prompt)

    def evaluations(self) -> list[Evaluation]:
        return self._messages(self.context.topics.evals, Evaluation)

    def letters(self) -> list[DeadLetter]:
        return self._messages(self.context.topics.dead, DeadLetter)

    def _messages(self, topic: Topic, kind: type[MessageT]) -> list[MessageT]:
        records = read_all(self.context.bus, topic, deadline_s=5)
        return Gate(kind, self.context.run, passed_over).messages(records)

    def generate(self, purpose: str = TRAIN, iteration: int | None = None) -> None:
        """Answer what was not answered yet."""
        for prompt in self.prompts().values():
            is_due = self.spec.algorithm.order == "arrival" or iteration in (None, prompt.iteration)
            if prompt.purpose == purpose and is_due:
                for index in range(prompt.size):
                    if (prompt.group, index) not in self.answered:
                        self.answered.add((prompt.group, index))
                        self.publish(answer(self.spec, prompt, index))

    def publish(self, sample: Sample) -> None:
        topic = self.context.topics.samples
        self.context.writer.send(topic, encode(sample), key=sample.id, partition=sample.length_class)

    def train(self, iteration: int) -> None:
        """Record an iteration, of all its samples; with order arrival, of some groups of many."""
        steps = self.spec.algorithm.optimizer_steps
        rows: dict[int, list[tuple[Sample, tuple[int, int]]]] = {mini: [] for mini in range(steps)}
        records = read_all(self.context.bus, self.context.topics.samples, deadline_s=5)
        found = [
            (record, sample)
            for record, sample in Gate(Sample, self.context.run, passed_over).take(records)
            if sample.purpose == TRAIN
        ]
        arrived = self._arrived(iteration, {sample.group for _, sample in found})
        for record, sample in found:
            if sample.group in arrived if arrived else sample.iteration == iteration:
                mini = arrived.get(sample.group, sample.mini)
                rows[mini].append((sample, (record.partition, record.offset)))
        for mini, mine in rows.items():
            step = make_step(
                self.spec, iteration, [sample for sample, _ in mine], mini=mini,
                places=[place for _, place in mine],
            )  # fmt: skip
            self.taken.add(step)
            self.context.writer.send(self.context.topics.ledger, encode(step), key=str(step.step))

    def _arrived(self, iteration: int, whole: set[int]) -> dict[int, int]:
        """Which groups an iteration takes, and in which step, if they came in an order of their own."""
        algorithm = self.spec.algorithm
        if algorithm.order == "window":
            return {}
        waiting = sorted(group for group in whole if group not in self.taken)
        random.Random(iteration).shuffle(waiting)
        order = ArrivalOrder(algorithm.model_copy(update={"optimizer_steps": 1}), self.taken, iteration, 0)
        found: dict[int, int] = {}
        while order.left:
            group = next(one for one in waiting if order.takes(one))
            waiting.remove(group)
            order.took(group)
            found[group] = len(found) * algorithm.optimizer_steps // algorithm.groups
        return found

    def await_groups(self, wanted: Iterable[int], deadline_s: float = 30.0) -> None:
        groups = set(wanted)
        wait_until(
            lambda: groups <= self.prompts().keys(), what=f"{len(groups)} groups", deadline_s=deadline_s
        )

    def admissible(self, version: int) -> range:
        """Groups that are admitted once a version is there."""
        algorithm = self.spec.algorithm
        count = int((version + algorithm.lookahead + 1) * algorithm.groups + 1e-9)
        return range(min(count, algorithm.iterations * algorithm.groups))


class Life:
    """A feeder in a thread: `end` stops it; what it raised is `error`."""

    def __init__(self, context: RoleContext, held_out: Sequence[Any] = ()) -> None:
        self.context = context
        self.feeder = Feeder(context, PROBLEMS, list(held_out), lambda text: [4, 5]).open()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.feeder.run()
        except (Stopped, Replaced, Exception) as error:
            self.error = error

    def ended(self, deadline_s: float = 30.0) -> None:
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), "the feeder did not end"

    def end(self) -> None:
        self.context.stop.set()
        self.ended()
        if self.error is not None and not isinstance(self.error, Stopped):
            raise self.error


@contextmanager
def fed(others: Others, held_out: Sequence[Any] = ()) -> Iterator[Life]:
    """A feeder, while the block lasts."""
    life = Life(others.life(), held_out)
    try:
        yield life
    finally:
        life.end()


def essence(prompt: Prompt) -> list[Any]:
    """All of a prompt but when it was admitted."""
    return [
        value.tolist() if isinstance(value, np.ndarray) else value
        for name in prompt.__struct_fields__
        if name != "admitted_at"
        for value in [getattr(prompt, name)]
    ]
