"""Which groups are admitted with which record: a pure function of the run file and the ledger.

A feeder that starts again computes the same prompts again, however often it was interrupted, because nothing
here depends on time: problems are shuffled by seed, and the ranker of a version has learned from exactly the
iterations before it. What is on `<run>.prompts` already is not planned again.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from producers.lengths import class_of, edges_of, have_moved
from producers.ranker.ranker import Predictor, Question, question_of
from producers.tasks import Problem, TaskError
from schemas.admission import admissible, oldest_version, window_of
from schemas.identity import ROUND, derive_seed
from schemas.messages import EVAL, TRAIN, Prompt, StepRecord
from schemas.runspec import RunSpec

Tokenize = Callable[[str], list[int]]

_RECENT_WINDOWS = 4  # that class edges are made from


class Planner:
    """Plans a run's prompts, iteration by iteration."""

    def __init__(
        self,
        run: str,
        spec: RunSpec,
        train: Sequence[Problem],
        tokenize: Tokenize,
        known: Iterable[Prompt] = (),
    ) -> None:
        """`known`: what is on `<run>.prompts` already."""
        self._run, self._spec, self._train = run, spec, train
        self._tokenize = functools.lru_cache(maxsize=4096)(tokenize)  # a prompt, then each of its samples
        self._by_id = {problem["id"]: problem for problem in train}
        self._known = {prompt.group: prompt for prompt in known if prompt.purpose == TRAIN}
        given = spec.lengths.edges
        self._fixed = not isinstance(given, str)
        # before anything is known of lengths, all is in the first class
        self.edges = [float("inf")] * (spec.lengths.classes - 1) if isinstance(given, str) else list(given)
        self._recent: deque[float] = deque(maxlen=_RECENT_WINDOWS * spec.algorithm.groups)
        self._admitted = 0
        self._steps = 0
        self._epoch_order: tuple[int, list[int]] = (-1, [])
        self.version = 0  # iterations whose last step is in the ledger

    def observe(self, record: StepRecord) -> bool:
        """Take a step of the ledger in; True if it ended an iteration."""
        if record.step != self._steps:
            return False  # of a trainer that was thought dead: the first record of a step counts
        self._steps += 1
        if record.last_of_iteration:
            self.version = record.iteration + 1
        return record.last_of_iteration

    def _allowed(self, version: int) -> int:
        """How many groups may be admitted once a version is there."""
        algorithm = self._spec.algorithm
        if algorithm.mode == "offline":
            return 0
        return min(
            admissible(version, algorithm.groups, algorithm.lookahead),
            algorithm.iterations * algorithm.groups,
        )

    def first_incomplete(self, trained: int) -> int:
        """The oldest version at which something is to be planned, if `trained` is the newest."""
        missing = next(group for group in itertools.count() if group not in self._known)
        return next((v for v in range(trained) if self._allowed(v) > missing), trained)

    def admit(self, ranker_at: Callable[[int], Predictor]) -> list[Prompt]:
        """All groups that may be admitted now and were not before. The ranker is asked for if needed."""
        allowed = self._allowed(self.version)
        fresh = range(self._admitted, allowed)
        self._admitted = max(allowed, self._admitted)
        if all(group in self._known for group in fresh):
            self._move_edges([self._known.pop(group).predicted for group in fresh])
            return []
        ranker = ranker_at(self.version)
        problems = {group: self._problem(group) for group in fresh}
        predicted = self._predict(ranker, {group: problem for group, (problem, _) in problems.items()})
        self._move_edges(list(predicted.values()))
        prompts: list[Prompt] = []
        groups = self._spec.algorithm.groups
        for window in sorted({window_of(group, groups) for group in fresh}):
            members = [group for group in fresh if window_of(group, groups) == window]
            prompts += self._admit_window(window, members, problems, predicted, ranker.name)
        return prompts

    def _predict(self, ranker: Predictor, problems: Mapping[int, Problem]) -> dict[int, float]:
        longest = self._spec.sampling.max_tokens
        said = ranker.predict([self._question(problem) for problem in problems.values()])
        return {
            group: min(max(length, 1.0), float(longest))
            for group, length in zip(problems, said.tolist(), strict=True)
        }

    def _move_edges(self, predicted: Sequence[float]) -> None:
        """Classes are quantiles of what was predicted lately: they drift with the policy."""
        classes = self._spec.lengths.classes
        if self._fixed or edges_of(predicted, classes) is None:
            return  # the ranker knows nothing yet
        self._recent.extend(predicted)
        edges = edges_of(self._recent, classes)
        if edges is not None and have_moved(self.edges, edges):
            self.edges = edges

    def question(self, problem_id: str) -> Question:
        """A problem as the ranker knows it."""
        problem = self._by_id.get(problem_id)
        if problem is None:
            raise TaskError(
                f"a sample on the log is of problem {problem_id!r}, which the task does not have: "
                "has the task changed since the run began?"
            )
        return self._question(problem)

    def _question(self, problem: Problem) -> Question:
        return question_of(problem["id"], problem.get("kind"), self._tokenize(problem["prompt"]))

    def _admit_window(
        self,
        window: int,
        groups: Sequence[int],
        problems: Mapping[int, tuple[Problem, int]],
        predicted: Mapping[int, float],
        predictor: str,
    ) -> Iterator[Prompt]:
        """Deal groups to optimizer steps across all lengths; cut each step's into bundles of like length."""
        algorithm = self._spec.algorithm
        ordered = sorted(groups, key=lambda group: (predicted[group], group))
        steps = algorithm.optimizer_steps
        for mini in range(steps):
            # An iteration may be admitted in several lots: each goes on dealing where the one before ended.
            dealt = ordered[(mini - groups[0] % algorithm.groups) % steps :: steps]
            for bundle in self._bundles(dealt, predicted):
                for group in bundle:
                    problem, epoch = problems[group]
                    yield self._prompt(
                        TRAIN, group, problem, epoch, size=algorithm.group_size, window=window,
                        mini=mini, bundle=bundle[0], bundle_groups=len(bundle), predicted=predicted[group],
                        predictor=predictor,
                        min_version=oldest_version(group, algorithm.groups, algorithm.lookahead),
                    )  # fmt: skip

    def _bundles(self, groups: Sequence[int], predicted: Mapping[int, float]) -> list[list[int]]:
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

    def instead(self, group: int, window: int, mini: int, ranker: Predictor) -> Prompt:
        """A group of another problem in the place of one that told nothing: which one, its number says."""
        number = group + ROUND
        draw = random.Random(derive_seed("instead", self._spec.seed, number))
        problem = self._train[draw.randrange(len(self._train))]
        algorithm = self._spec.algorithm
        return self._prompt(
            TRAIN, number, problem, group % ROUND // len(self._train), size=algorithm.group_size,
            window=window, mini=mini, bundle=number, bundle_groups=1,
            predicted=self._predict(ranker, {number: problem})[number], predictor=ranker.name,
            min_version=oldest_version(number, algorithm.groups, algorithm.lookahead),
        )  # fmt: skip

    def evaluate(self, version: int, problems: Sequence[Problem], ranker: Predictor) -> list[Prompt]:
        """Prompts that measure a version on held-out problems."""
        first = version * len(problems)
        predicted = self._predict(ranker, dict(enumerate(problems)))
        return [
            self._prompt(
                EVAL, -1 - (first + number), problem, 0, size=self._spec.evaluation.per_problem,
                window=version, mini=0, bundle=0, bundle_groups=1, predicted=predicted[number],
                predictor=ranker.name, min_version=version,
            )
            for number, problem in enumerate(problems)
        ]  # fmt: skip

    def _prompt(
        self, purpose: str, group: int, problem: Problem, epoch: int, *, size: int, window: int, mini: int,
        bundle: int, bundle_groups: int, predicted: float, predictor: str, min_version: int,
    ) -> Prompt:  # fmt: skip
        return Prompt(
            run=self._run, purpose=purpose, group=group, size=size, problem_id=problem["id"],
            problem=json.dumps(problem), epoch=epoch,
            tokens=np.array(self._tokenize(problem["prompt"]), dtype=np.int32), window=window, mini=mini,
            bundle=bundle, bundle_groups=bundle_groups, min_version=min_version, predicted=predicted,
            predictor=predictor, length_class=class_of(predicted, self.edges),
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
