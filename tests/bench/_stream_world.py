"""A run in virtual time: planner, dispatcher, generators and order of training are the real ones.

    planner ──► dispatcher ──► generators on `ReplayEngine`s ──► whole groups ──► a learner of given speed
       ▲                                                                                │
       └──────────────────── steps, and new weights for the generators ◄────────────────┘

The learner trains groups one after the other, in the order in which the step takes them. The dispatcher's
own time is charged, as in `_virtual.py`. A running sample that moves is handed over at once, is on its way
for `TRAVEL_S`, and then its new generator prefills its tokens, while nothing else gets on there. So it is
when the tokens of running samples are computed anew for new weights.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from consumers.stream.arrival_order import ArrivalOrder
from infra.weights.digest import digests_of
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import Policy
from producers.engines.engine import SampleRequest
from producers.engines.without_model import ReplayEngine, VirtualClock
from producers.generator_core import Decoding, MadeSample
from producers.installing import VerifiedWeights
from producers.planner import Planner
from schemas.admission import first_open, iteration_of
from schemas.identity import SampleKey, sample_id, sample_key
from schemas.messages import Prompt, StepRecord
from schemas.runspec import RunSpec
from schemas.taken import TakenGroups
from tests.bench._virtual import PREFILL_S
from tests.bench._workloads import ToldLengths
from tests.factories import make_patch

# A part passes through Kafka, and so does the job that names it; both are taken in turns of 0.1 to 0.15 s.
TRAVEL_S = 0.3

_TENSORS = {"w": torch.zeros(1)}
_DIGESTS, _PATCH = digests_of(_TENSORS), make_patch(_TENSORS)


@dataclass(frozen=True)
class Learner:
    """How fast the trainer is."""

    tokens_per_s: float
    step_s: float  # optimizer step and publishing, until generators have the new weights


@dataclass
class TrainedStep:
    """A step as it came out."""

    ends: float
    groups: list[int]
    staleness: list[int]  # of each sample
    tokens: int


@dataclass
class StreamResult:
    """The steps of a run, and how long slots were empty."""

    steps: list[TrainedStep] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)  # slot seconds without work, up to each step's end
    made: list[tuple[int, int]] = field(default_factory=list)  # samples and tokens made, up to then
    moves: int = 0
    moved_tokens: int = 0  # that were prefilled anew for that


class StreamWorld:
    """One run. `lengths`: of each sample; `told`: by the key of a question, what the ranker says."""

    def __init__(
        self,
        spec: RunSpec,
        policy: Policy,
        tables: Sequence[np.ndarray],
        lengths: Mapping[SampleKey, int],
        told: Mapping[int, float],
        learner: Learner,
        *,
        prefill_s: float = PREFILL_S,
    ) -> None:
        """`prefill_s`: for each token that is computed anew, after a move or for new weights."""
        self._prefill_s = prefill_s
        self._spec, self._learner, self._lengths = spec, learner, lengths
        algorithm = spec.algorithm
        problems = [
            {"id": str(group), "prompt": ""} for group in range(algorithm.iterations * algorithm.groups)
        ]
        self._planner = Planner("bench", spec, problems, lambda text: [])
        self._ranker = ToldLengths(told)
        self._clock = VirtualClock()
        self._dispatcher = Dispatcher(policy)
        self._taken = TakenGroups(algorithm)
        self._whole: list[int] = []  # groups that wait to be trained, in order of arrival
        self._parts: dict[int, list[MadeSample]] = {}
        self._on_the_way: list[tuple[float, int, Callable[[], None]]] = []  # when, and what happens then
        self._numbers = itertools.count()
        self._open: dict[int, Prompt] = {}
        self.result = StreamResult()
        self._slots = sum(len(table) - 1 for table in tables)
        self._busy_s, self._samples, self._tokens = 0.0, 0, 0
        self._join(tables)
        self._begin_step()

    def _join(self, tables: Sequence[np.ndarray]) -> None:
        def length_of(request: SampleRequest) -> int:
            return self._lengths[sample_key(request.id)]

        self._engines, self._generators = dict[str, ReplayEngine](), dict[str, Decoding]()
        for number, table in enumerate(tables):
            name = f"g{number:03d}"
            self._engines[name] = ReplayEngine(table, length_of, self._clock, prefill_s=self._prefill_s)
            self._generators[name] = Decoding(self._spec, self._engines[name], self._clock.now)
            self._dispatcher.join(name, len(table) - 1, table, 0.0)
        self._ends = dict.fromkeys(self._engines, float("inf"))
        self._touched: set[str] = set()
        self._weights(0)

    def run(self) -> StreamResult:
        """Run until all is trained."""
        self._admit()
        while len(self.result.steps) < self._spec.algorithm.iterations:
            arrives = self._dispatch()
            for name in self._touched:
                self._generators[name].fill()
                self._ends[name] = self._engines[name].next_end()
            self._touched.clear()
            due = self._on_the_way[0][0] if self._on_the_way else float("inf")
            self._pass(min(max(self._dispatcher.wakes_at, arrives), due, *self._ends.values()))
            while self._on_the_way and self._on_the_way[0][0] <= self._clock.time:
                heapq.heappop(self._on_the_way)[2]()
            for name, ends in self._ends.items():
                if ends <= self._clock.time:
                    for made in self._generators[name].step(0.0):
                        self._made(made)
                    self._touched.add(name)
        return self.result

    def _pass(self, until: float) -> None:
        assert until < float("inf"), "nothing is to come"
        running = sum(generator.running for generator in self._generators.values())
        self._busy_s += running * (until - self._clock.time)
        self._clock.time = until

    def _later(self, at: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._on_the_way, (at, next(self._numbers), happens))

    def _dispatch(self) -> float:
        began = time.thread_time()
        dealt = self._dispatcher.turn(self._clock.time)
        moved = self._dispatcher.moved(self._clock.time)
        arrives = self._clock.time + time.thread_time() - began
        for name, jobs in dealt.items():
            self._later(arrives, lambda name=name, jobs=jobs: self._take(name, jobs))  # type: ignore[misc]
        for job, source, target in moved:
            self._move(job, source, target, arrives + TRAVEL_S)
        return arrives

    def _move(self, job: SampleJob, source: str, target: str, arrives: float) -> None:
        self._touched.add(source)
        for left in self._generators[source].hand_over([sample_id(*job.key)]):  # none: it is done just now
            part = left.part("bench", source, self._clock.time)
            self.result.moves += 1
            self.result.moved_tokens += part.tokens.size
            moving = replace(job, part=part)
            self._later(arrives, lambda moving=moving: self._arrive(target, moving))  # type: ignore[misc]
        if self._generators[source].give_back([sample_id(*job.key)]):  # it is not begun
            self._later(arrives, lambda: self._arrive(target, job))

    def _arrive(self, name: str, job: SampleJob) -> None:
        self._take(name, [job])
        self._dispatcher.arrived(job.key)

    def _take(self, name: str, jobs: Sequence[SampleJob]) -> None:
        for job in jobs:
            self._generators[name].take(job)
        self._touched.add(name)

    def _made(self, made: MadeSample) -> None:
        key, length = made.begun.job.key, len(made.finished.tokens)
        self._samples += 1
        self._tokens += length
        self._dispatcher.finished(key, length, self._clock.time)
        parts = self._parts.setdefault(key[0], [])
        parts.append(made)
        if len(parts) == self._spec.algorithm.group_size:
            self._whole.append(key[0])
            self._train()

    def _begin_step(self) -> None:
        iteration = len(self.result.steps)
        self._step: list[int] = []
        self._trained_at = self._clock.time
        self._order = None
        if self._spec.algorithm.order == "arrival":
            self._order = ArrivalOrder(self._spec.algorithm, self._taken, iteration, 0)

    def _takes(self, group: int) -> bool:
        if self._order is not None:
            return self._order.takes(group)
        return iteration_of(group, self._spec.algorithm.groups) == len(self.result.steps)

    def _train(self) -> None:
        """Train the whole groups that the step takes; after the last one comes the optimizer step."""
        if len(self._step) == self._spec.algorithm.groups:
            return  # it is being trained
        for group in list(self._whole):
            if len(self._step) < self._spec.algorithm.groups and self._takes(group):
                self._whole.remove(group)
                self._step.append(group)
                if self._order is not None:
                    self._order.took(group)
                tokens = sum(len(made.finished.tokens) for made in self._parts[group])
                begins = max(self._trained_at, self._clock.time)
                self._trained_at = begins + tokens / self._learner.tokens_per_s
        if len(self._step) == self._spec.algorithm.groups:
            self._later(self._trained_at + self._learner.step_s, self._stepped)

    def _stepped(self) -> None:
        iteration = len(self.result.steps)
        parts = [made for group in self._step for made in self._parts.pop(group)]
        self.result.steps.append(
            TrainedStep(
                self._clock.time, self._step, [iteration - min(made.begun.versions) for made in parts],
                sum(len(made.finished.tokens) for made in parts),
            )
        )  # fmt: skip
        self.result.idle.append(self._slots * self._clock.time - self._busy_s)
        self.result.made.append((self._samples, self._tokens))
        record = _record(iteration, self._step)
        self._taken.add(record)
        self._planner.observe(record)
        gone = [group for group in self._open if group < first_open(iteration + 1, self._spec.algorithm)]
        for group in gone:
            del self._open[group]
        self._dispatcher.forget(gone)
        self._weights(iteration + 1)
        self._admit()
        self._begin_step()
        self._train()

    def _weights(self, version: int) -> None:
        for name, generator in self._generators.items():
            generator.update(VerifiedWeights(version, f"root {version}", _DIGESTS, _PATCH))
            self._touched.add(name)

    def _admit(self) -> None:
        prompts = self._planner.admit(lambda version: self._ranker)
        self._open |= {prompt.group: prompt for prompt in prompts}
        self._dispatcher.admit(
            [SampleJob(prompt, index) for prompt in prompts for index in range(prompt.size)], self._clock.time
        )


def _record(iteration: int, groups: Sequence[int]) -> StepRecord:
    """A step of the ledger, with one row a group: the planner reads no more of it."""
    count = len(groups)
    whole, small = np.zeros(count, np.int64), np.zeros(count, np.int16)
    return StepRecord(
        run="bench", trainer_epoch=0, iteration=iteration, step=iteration, last_of_iteration=True,
        version_in=iteration, version_out=iteration + 1, root_out="", recipe="", partitions=small,
        offsets=whole, groups=np.array(groups, np.int64), indexes=small, lengths=whole.astype(np.int32),
        rewards=whole.astype(np.float32), versions=whole.astype(np.int32),
        predicted=whole.astype(np.float32), problem_ids=[""] * count,
        microbatches=np.array([count], np.int32), losses=np.zeros(1), metrics={}, finished_at=0.0,
    )  # fmt: skip
