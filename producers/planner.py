"""Plans which groups each ledger record admits: a pure function of the run file and the ledger.

A feeder that starts again, however often, computes the same prompts, because nothing here depends on time:
problems are shuffled by seed, and the ranker of a version has learned from exactly the iterations before it.
Prompts that are on `<run>.prompts` already are not planned again, and neither are trained iterations.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from producers.chat import Tokenize
from producers.lengths import class_edges, class_of, have_moved
from producers.ranker.ranker import Predictor, Question, question_of
from producers.snapshots import Lot, PlannerState
from producers.tasks import Problem, TaskError
from schemas.admission import admissible, first_open, iteration_of, latest_iteration, oldest_version
from schemas.algorithm import AlgorithmSection
from schemas.identity import ROUND, derive_seed
from schemas.messages import EVAL, TRAIN, Prompt, StepRecord
from schemas.runspec import LengthsSection, RunSpec
from schemas.taken import TakenGroups

_RECENT_WINDOWS = 4  # iterations whose predictions the class edges are computed from


@dataclass(frozen=True)
class _Told:
    """The fields of a sent prompt that later prompts depend on."""

    predicted: float
    predictor: str
    edges: tuple[float, ...]


class _Turn(NamedTuple):
    """When a group is trained, or evaluated."""

    iteration: int  # with order arrival: at the latest
    min_version: int  # the oldest weights that may draw its samples
    mini: int = 0  # the optimizer step within the iteration
    bundle: int = 0
    bundle_groups: int = 1


class _Prediction(NamedTuple):
    """The length that is predicted for a group's samples."""

    length: float
    predictor: str
    edges: list[float]  # of the length classes


@dataclass(frozen=True)
class PlannerPast:
    """The part of a planner's state that follows from the prompts that it sent."""

    ITERATIONS: ClassVar[int] = _RECENT_WINDOWS  # earlier ones whose prompts are looked at

    edges: Sequence[float] = ()  # of the length classes; empty: not known
    recent: Sequence[float] = ()
    lots: Sequence[Lot] = ()

    @classmethod
    def of(
        cls, prompts: Iterable[Prompt], algorithm: AlgorithmSection, lengths: LengthsSection, trained: int,
        admitted: int,
    ) -> PlannerPast:  # fmt: skip
        """Return the state after `admitted` groups, while `trained` iterations are trained."""
        known = {prompt.group: prompt for prompt in prompts}
        recent = deque[float](maxlen=_RECENT_WINDOWS * algorithm.groups)
        lots: list[Lot] = []
        edges: list[float] = []
        for version in range(max(0, trained - _RECENT_WINDOWS - int(algorithm.most_stale) - 1), trained):
            first = admissible(version - 1, algorithm.groups, algorithm.lookahead) if version else 0
            until = min(admissible(version, algorithm.groups, algorithm.lookahead), admitted)
            lot = [known[group] for group in range(first, until) if group in known]
            if not lot:
                continue
            predicted, edges = [prompt.predicted for prompt in lot], list(lot[-1].edges)
            if isinstance(lengths.edges, str) and class_edges(predicted, lengths.classes) is not None:
                recent.extend(predicted)
            if len(lot) == until - first and latest_iteration(lot[-1].group, algorithm) >= trained:
                name = lot[0].predictor
                lots.append(
                    Lot(version=version, first=first, predicted=predicted, predictor=name, edges=edges)
                )
        return cls(edges, list(recent), lots)


class Planner:
    """Plans a run's prompts, iteration by iteration."""

    def __init__(
        self,
        run: str,
        spec: RunSpec,
        train: Sequence[Problem],
        tokenize: Tokenize,
        known: Iterable[Prompt] = (),
        *,
        state: PlannerState | None = None,
        trained: int = 0,
    ) -> None:
        """`known`: prompts on `<run>.prompts`. `trained`: how many iterations need no prompts any more.

        `state`: the state of an earlier planner. Groups that it admitted count as known.
        """
        self._run, self._spec, self._train = run, spec, train
        # for the ranker, then for the record; messages can't be keys, and their JSON can
        self._tokenize = functools.lru_cache(maxsize=4096)(lambda prompt: tokenize(json.loads(prompt)))
        self._by_id = {problem["id"]: problem for problem in train}
        given = spec.lengths.edges
        self._fixed = not isinstance(given, str)
        # while no length is known, all prompts are in the first class
        self.edges = [float("inf")] * (spec.lengths.classes - 1) if isinstance(given, str) else list(given)
        state = state or PlannerState(edges=self.edges)
        self.edges = list(state.edges)
        self._recent = deque(state.recent, maxlen=_RECENT_WINDOWS * spec.algorithm.groups)
        self._planned, self._admitted, self.steps = state.planned, state.admitted, state.steps
        self._lots = list(state.lots)
        self._epoch_order: tuple[int, list[int]] = (-1, [])
        self.version = state.version  # iterations whose last step is in the ledger
        self._trained = max(trained, state.version)
        self._taken = TakenGroups(spec.algorithm, state.version, state.taken)
        self._known = self._told(known)
        if self._planned >= self.version and self._allowed(self._planned) > self._admitted:
            self._planned = self.version - 1  # the run was shorter then: its end cut off what was admitted

    def _told(self, known: Iterable[Prompt]) -> dict[int, _Told]:
        found: dict[int, _Told] = {}
        last = _Told(0.0, "", ())
        for prompt in known:
            if prompt.purpose == TRAIN and self._admitted <= prompt.group < ROUND:
                edges, predictor = tuple(prompt.edges), prompt.predictor
                if (last.edges, last.predictor) == (edges, predictor):
                    edges, predictor = last.edges, last.predictor  # keep one copy of each in memory
                last = _Told(prompt.predicted, predictor, edges)
                found.setdefault(prompt.group, last)
        return found

    def state(self) -> PlannerState:
        """Return the planner's state, for a snapshot."""
        return PlannerState(
            version=self.version, steps=self.steps, planned=self._planned, admitted=self._admitted,
            edges=list(self.edges), recent=list(self._recent), lots=list(self._lots),
            taken=self._taken.known(),
        )  # fmt: skip

    def observe(self, record: StepRecord) -> bool:
        """Take a step of the ledger in. Return True if it ended an iteration.

        Earlier steps may be missing: steps that are gone from the log count as trained.
        """
        if record.step < self.steps:
            return False  # a repeated step, of a trainer that was thought dead: the first record counts
        self.steps = record.step + 1
        self._taken.add(record)
        before, self.version = self.version, record.iteration + record.last_of_iteration
        self._trained = max(self._trained, self.version)
        return self.version > before

    def begin_at(self, version: int) -> None:
        """Go on after `version` trained iterations, whose steps are gone from the ledger."""
        self.version, self.steps = version, version * self._spec.algorithm.optimizer_steps
        self._taken.begin(version)
        self._trained = max(self._trained, version)

    @property
    def admitted(self) -> int:
        """The number of admitted groups, without resampled ones."""
        return self._admitted

    def _allowed(self, version: int) -> int:
        """Return how many groups may be admitted once a version is there."""
        algorithm = self._spec.algorithm
        if algorithm.mode == "offline":
            return 0
        return min(
            admissible(version, algorithm.groups, algorithm.lookahead),
            algorithm.iterations * algorithm.groups,
        )

    def _is_missing(self, group: int) -> bool:
        """Whether a group has to be planned: it was neither sent nor trained."""
        if group in self._known or group in self._taken:
            return False
        return latest_iteration(group, self._spec.algorithm) >= self._trained

    def first_incomplete(self, trained: int) -> int:
        """Return the oldest version at which something is to be planned, if `trained` is the newest."""
        first = max(self._admitted, first_open(self._trained, self._spec.algorithm))
        missing = (group for group in range(first, self._allowed(trained)) if self._is_missing(group))
        group = next(missing, None)
        if group is None:
            return trained
        return next(v for v in range(self._planned + 1, trained + 1) if self._allowed(v) > group)

    def admit(self, ranker_at: Callable[[int], Predictor]) -> list[Prompt]:
        """Return prompts for all groups that may be admitted now and were not before.

        `ranker_at` is only called for versions that admit any.
        """
        self._lots = [lot for lot in self._lots if self._is_open(lot)]
        prompts: list[Prompt] = []
        for version in range(self._planned + 1, self.version + 1):
            prompts += self._admit_lot(version, ranker_at)
        return prompts

    def _admit_lot(self, version: int, ranker_at: Callable[[int], Predictor]) -> list[Prompt]:
        allowed = self._allowed(version)
        fresh = range(self._admitted, allowed)
        self._admitted, self._planned = max(allowed, self._admitted), version
        if not any(self._is_missing(group) for group in fresh):
            self._pass_over(version, fresh)
            return []
        ranker = ranker_at(version)
        problems = [self._problem(group)[0] for group in fresh]
        predicted = self._predict(ranker, problems)
        self._move_edges(predicted)
        lot = Lot(
            version=version, first=fresh.start, predicted=predicted, predictor=ranker.name,
            edges=list(self.edges),
        )  # fmt: skip
        self._lots.append(lot)
        known = {group for group in fresh if self._known.pop(group, None) is not None}
        return [
            prompt
            for prompt in self._prompts(lot)
            if prompt.iteration >= self._trained
            and prompt.group not in known
            and prompt.group not in self._taken
        ]

    def _pass_over(self, version: int, fresh: Sequence[int]) -> None:
        """Skip groups that were sent or trained. The log may have lost their prompts."""
        known = [told for group in fresh if (told := self._known.pop(group, None)) is not None]
        self._move_edges([told.predicted for told in known])
        if not known:
            return
        self.edges = list(known[0].edges)  # the edges in force then, even if older predictions are gone
        if len(known) == len(fresh):
            lot = Lot(
                version=version, first=fresh[0], predicted=[told.predicted for told in known],
                predictor=known[0].predictor, edges=list(self.edges),
            )  # fmt: skip
            if self._is_open(lot):
                self._lots.append(lot)

    def _is_open(self, lot: Lot) -> bool:
        last = lot.first + len(lot.predicted) - 1
        return latest_iteration(last, self._spec.algorithm) >= self._trained

    def open_groups(self) -> set[int]:
        """Return the groups that are admitted and not trained, without resampled ones."""
        groups = range(first_open(self.version, self._spec.algorithm), self._admitted)
        return {group for group in groups if group not in self._taken}

    def again(self, lost: Collection[int]) -> list[Prompt]:
        """Return again the prompts of `lost` groups: they were sent, and are gone from the log."""
        return [prompt for lot in self._lots for prompt in self._prompts(lot) if prompt.group in lost]

    def _prompts(self, lot: Lot) -> Iterator[Prompt]:
        """Yield the prompts of a lot: the same ones whenever this is called."""
        groups = self._spec.algorithm.groups
        members = range(lot.first, lot.first + len(lot.predicted))
        if self._spec.algorithm.order == "arrival":
            yield from (self._of_arrival(group, lot) for group in members)
            return
        for iteration in sorted({iteration_of(group, groups) for group in members}):
            yield from self._of_iteration(
                iteration, [g for g in members if iteration_of(g, groups) == iteration], lot
            )

    def _predict(self, ranker: Predictor, problems: Iterable[Problem]) -> list[float]:
        longest = float(self._spec.sampling.max_tokens)
        said = ranker.predict([self._question(problem) for problem in problems])
        return [min(max(length, 1.0), longest) for length in said.tolist()]

    def _move_edges(self, predicted: Sequence[float]) -> None:
        """Recompute the class edges from recent predictions, since lengths drift while the policy learns."""
        classes = self._spec.lengths.classes
        if self._fixed or class_edges(predicted, classes) is None:
            return  # all predictions are alike: the ranker knows nothing yet
        self._recent.extend(predicted)
        edges = class_edges(self._recent, classes)
        if edges is not None and have_moved(self.edges, edges):
            self.edges = edges

    def question(self, problem_id: str) -> Question:
        """Return a problem's question for the ranker. Raises TaskError if the task has no such problem."""
        problem = self._by_id.get(problem_id)
        if problem is None:
            raise TaskError(
                f"a sample on the log is of problem {problem_id!r}, which the task does not have: "
                "has the task changed since the run began?"
            )
        return self._question(problem)

    def _tokens(self, problem: Problem) -> list[int]:
        return self._tokenize(json.dumps(problem["prompt"]))

    def _question(self, problem: Problem) -> Question:
        return question_of(problem["id"], problem.get("kind"), self._tokens(problem))

    def _of_iteration(self, iteration: int, groups: Sequence[int], lot: Lot) -> Iterator[Prompt]:
        """Yield an iteration's prompts. Each step gets groups of all lengths, in bundles of like length."""
        algorithm = self._spec.algorithm
        predicted = {group: lot.predicted[group - lot.first] for group in groups}
        problems = {group: self._problem(group) for group in groups}
        ordered = sorted(groups, key=lambda group: (predicted[group], group))
        steps = algorithm.optimizer_steps
        for mini in range(steps):
            # An iteration may be admitted in several lots: each goes on dealing where the one before ended.
            dealt = ordered[(mini - groups[0] % algorithm.groups) % steps :: steps]
            for bundle in self._bundles(dealt, predicted):
                for group in bundle:
                    problem, epoch = problems[group]
                    yield self._prompt(
                        TRAIN, group, problem, epoch, algorithm.group_size,
                        _Turn(iteration, self._oldest(group), mini, bundle[0], len(bundle)),
                        _Prediction(predicted[group], lot.predictor, lot.edges),
                    )  # fmt: skip

    def _of_arrival(self, group: int, lot: Lot) -> Prompt:
        """Return the prompt of a group that no step has to wait for before its last iteration."""
        problem, epoch = self._problem(group)
        turn = _Turn(latest_iteration(group, self._spec.algorithm), self._oldest(group), bundle=group)
        prediction = _Prediction(lot.predicted[group - lot.first], lot.predictor, lot.edges)
        return self._prompt(TRAIN, group, problem, epoch, self._spec.algorithm.group_size, turn, prediction)

    def _bundles(self, groups: Sequence[int], predicted: Mapping[int, float]) -> list[list[int]]:
        """Cut groups into bundles of about trainer.bundle_tokens tokens each, named by their first group."""
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

    def instead(self, group: int, iteration: int, mini: int, ranker: Predictor) -> Prompt:
        """Return a prompt that replaces a group which taught nothing. Its number determines its problem."""
        number = group + ROUND
        draw = random.Random(derive_seed("instead", self._spec.seed, number))
        problem = self._train[draw.randrange(len(self._train))]
        return self._prompt(
            TRAIN, number, problem, group % ROUND // len(self._train), self._spec.algorithm.group_size,
            _Turn(iteration, self._oldest(number), mini, number, 1),
            _Prediction(self._predict(ranker, [problem])[0], ranker.name, self.edges),
        )  # fmt: skip

    def _oldest(self, group: int) -> int:
        """Return the oldest version that may draw samples of a group."""
        algorithm = self._spec.algorithm
        return oldest_version(group, algorithm.groups, algorithm.lookahead)

    def evaluate(self, version: int, problems: Sequence[Problem], ranker: Predictor) -> list[Prompt]:
        """Return the prompts that measure a version on held-out problems."""
        first = version * len(problems)
        predicted = self._predict(ranker, problems)
        return [
            self._prompt(
                EVAL, -1 - (first + number), problem, 0, self._spec.evaluation.per_problem,
                _Turn(version, version), _Prediction(predicted[number], ranker.name, self.edges),
            )
            for number, problem in enumerate(problems)
        ]  # fmt: skip

    def _prompt(
        self, purpose: str, group: int, problem: Problem, epoch: int, size: int, turn: _Turn,
        prediction: _Prediction,
    ) -> Prompt:  # fmt: skip
        return Prompt(
            run=self._run, purpose=purpose, group=group, size=size, problem_id=problem["id"],
            problem=json.dumps(problem), epoch=epoch,
            tokens=np.array(self._tokens(problem), dtype=np.int32), iteration=turn.iteration,
            mini=turn.mini, bundle=turn.bundle, bundle_groups=turn.bundle_groups,
            min_version=turn.min_version, predicted=prediction.length, predictor=prediction.predictor,
            length_class=class_of(prediction.length, prediction.edges), edges=list(prediction.edges),
            admitted_at=time.time(),
        )  # fmt: skip

    def _problem(self, group: int) -> tuple[Problem, int]:
        """Return a group's problem and epoch."""
        epoch, place = divmod(group, len(self._train))
        if self._epoch_order[0] != epoch:
            order = list(range(len(self._train)))
            if self._spec.task.shuffle:
                random.Random(derive_seed("epoch", self._spec.seed, epoch)).shuffle(order)
            self._epoch_order = epoch, order
        return self._train[self._epoch_order[1][place]], epoch
