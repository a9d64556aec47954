"""Which groups are admitted with which record: a pure function of the run file and the ledger.

A feeder that starts again computes the same prompts again, however often it was interrupted, because nothing
here depends on time: problems are shuffled by seed, and predictions follow from the ledger's lengths.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from producers.lengths import HistoryPredictor, class_of, learn_edges
from producers.tasks import Problem
from schemas.admission import admissible, oldest_version, window_of
from schemas.identity import derive_seed
from schemas.messages import EVAL, TRAIN, Prompt, StepRecord
from schemas.runspec import RunSpec

Tokenize = Callable[[str], list[int]]


class Planner:
    """Plans a run's prompts, iteration by iteration."""

    def __init__(self, run: str, spec: RunSpec, train: Sequence[Problem], tokenize: Tokenize) -> None:
        self._run, self._spec, self._train, self._tokenize = run, spec, train, tokenize
        self._predictor = HistoryPredictor(spec.sampling.max_tokens)
        self._kinds = {problem["id"]: self._kind(problem) for problem in train}
        given = spec.lengths.edges
        self._edges: list[float] | None = list(given) if not isinstance(given, str) else None
        self._admitted = 0
        self._steps = 0
        self._epoch_order: tuple[int, list[int]] = (-1, [])
        self.version = 0  # iterations whose last step is in the ledger

    @property
    def edges(self) -> list[float]:
        """Class edges in force; before they are learned, all is in the first class."""
        classes = self._spec.lengths.classes
        return self._edges if self._edges is not None else [float("inf")] * (classes - 1)

    def observe(self, record: StepRecord) -> bool:
        """Take a step of the ledger in; True if it ended an iteration."""
        if record.step != self._steps:
            return False  # of a trainer that was thought dead: the first record of a step counts
        self._steps += 1
        for problem, length in zip(record.problem_ids, record.lengths.tolist(), strict=True):
            self._predictor.observe(problem, self._kinds.get(problem, ""), length)
        if not record.last_of_iteration:
            return False
        if self._edges is None:
            self._edges = learn_edges(record.lengths.tolist(), self._spec.lengths.classes)
        self.version = record.iteration + 1
        return True

    def admit(self) -> list[Prompt]:
        """All groups that may be admitted now and were not before."""
        algorithm = self._spec.algorithm
        allowed = min(
            admissible(self.version, algorithm.groups, algorithm.lookahead),
            algorithm.iterations * algorithm.groups,
        )
        fresh = range(self._admitted, allowed)
        self._admitted = max(allowed, self._admitted)
        prompts: list[Prompt] = []
        for window in sorted({window_of(group, algorithm.groups) for group in fresh}):
            members = [group for group in fresh if window_of(group, algorithm.groups) == window]
            prompts += self._admit_window(window, members)
        return prompts

    def _admit_window(self, window: int, groups: Sequence[int]) -> Iterator[Prompt]:
        """Deal groups to optimizer steps across all lengths; cut each step's into bundles of like length."""
        algorithm = self._spec.algorithm
        problems = {group: self._problem(group) for group in groups}
        predicted = {group: self._predict(problems[group][0]) for group in groups}
        ordered = sorted(groups, key=lambda group: (predicted[group], group))
        for mini in range(algorithm.optimizer_steps):
            dealt = ordered[mini :: algorithm.optimizer_steps]
            for bundle in self._bundles(dealt, predicted):
                for group in bundle:
                    problem, epoch = problems[group]
                    yield self._prompt(
                        TRAIN, group, problem, epoch, size=algorithm.group_size, window=window,
                        mini=mini, bundle=bundle[0], bundle_groups=len(bundle), predicted=predicted[group],
                        min_version=oldest_version(group, algorithm.groups, algorithm.lookahead),
                    )  # fmt: skip

    def _bundles(self, groups: Sequence[int], predicted: dict[int, float]) -> list[list[int]]:
        """Cut groups into runs of about trainer.bundle_tokens; a bundle is named by its first group."""
        if self._spec.composes_on_arrival:
            return [[group] for group in groups]
        bundles: list[list[int]] = []
        held = 0.0
        for group in groups:
            tokens = predicted[group] * self._spec.algorithm.group_size
            if not bundles or held + tokens > self._spec.trainer.bundle_tokens:
                bundles.append([])
                held = 0.0
            bundles[-1].append(group)
            held += tokens
        return bundles

    def evaluate(self, version: int, problems: Sequence[Problem]) -> list[Prompt]:
        """Prompts that measure a version on held-out problems."""
        first = version * len(problems)
        return [
            self._prompt(
                EVAL, -1 - (first + number), problem, 0, size=self._spec.evaluation.per_problem,
                window=version, mini=0, bundle=0, bundle_groups=1, predicted=self._predict(problem),
                min_version=version,
            )
            for number, problem in enumerate(problems)
        ]  # fmt: skip

    def _prompt(
        self, purpose: str, group: int, problem: Problem, epoch: int, *, size: int, window: int, mini: int,
        bundle: int, bundle_groups: int, predicted: float, min_version: int,
    ) -> Prompt:  # fmt: skip
        return Prompt(
            run=self._run, purpose=purpose, group=group, size=size, problem_id=problem["id"],
            problem=json.dumps(problem), epoch=epoch,
            tokens=np.array(self._tokenize(problem["prompt"]), dtype=np.int32), window=window, mini=mini,
            bundle=bundle, bundle_groups=bundle_groups, min_version=min_version, predicted=predicted,
            predictor=self._predictor.version, length_class=class_of(predicted, self.edges),
            edges=self.edges, admitted_at=time.time(),
        )  # fmt: skip

    def _problem(self, group: int) -> tuple[Problem, int]:
        """A group's problem and its epoch."""
        epoch, place = divmod(group, len(self._train))
        if self._epoch_order[0] != epoch:
            order = list(range(len(self._train)))
            if self._spec.task.shuffle:
                random.Random(derive_seed("epoch", self._spec.seed, epoch)).shuffle(order)
            self._epoch_order = epoch, order
        return self._train[self._epoch_order[1][place]], epoch

    def _kind(self, problem: Problem) -> str:
        return str(problem.get("kind") or len(problem["prompt"]))

    def _predict(self, problem: Problem) -> float:
        return self._predictor.predict(problem["id"], self._kind(problem))
