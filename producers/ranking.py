"""Trains the ranker in a thread of the feeder, iteration by iteration, and stores each version.

    fit samples, as they come ──► lengths of an iteration ──► learned ahead ─┐
    <run>.ledger ──► what was trained of it ──► is it the same? ─────────────┴─► ranker 0, 1, 2 … ──► store
                                                 no: learned again                 └─► planner: n ranks at n

Version n has learned from iterations 0 .. n-1 as the ledger reports them, in the order of their groups. So it
depends neither on timing nor on samples that were not trained: a feeder that starts again loads the newest
version that it may use and learns the rest from the ledger. Learning happens in a thread, mostly while the
trainer still trains: as soon as all samples of an iteration are there, it is learned ahead of the ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from infra.background import Background
from infra.roles.context import RoleContext
from infra.stores.store import Missing, StoreError
from producers.ranker.ranker import Answered, Backbone, NoBackbone, Question, Ranker, RankingScore, score_of
from producers.ranker.states import RankerError, States, start_from
from producers.sample_feed import AdmittedSample, SampleFeed
from producers.tasks import TaskError
from schemas.identity import round_of
from schemas.messages import TRAIN, StepRecord
from schemas.taken import trained_first

_POLL_S = 0.25
_KEPT = 8  # versions kept in the store beyond the staleness; up to twice as many until old ones are collected


class _Told(NamedTuple):
    length: int
    predicted: float
    problem_id: str


_IterationLengths = dict[int, dict[int, _Told]]  # an iteration, by group and index


def kept_versions(context: RoleContext) -> int:
    """Return how many versions of its ranker a run keeps."""
    return _KEPT + int(context.spec.algorithm.staleness)


def backbone_of(name: str, read: Callable[[int], None] = lambda count: None) -> Backbone:
    """Load the backbone that the run file names; NoBackbone for "none". `read`: is told how many it reads."""
    if name == "none":
        return NoBackbone()
    from producers.ranker.language_model import LanguageModel

    return LanguageModel(name, read)


class Ranking:
    """A thread that trains the ranker until it is closed."""

    def __init__(
        self, context: RoleContext, question: Callable[[str], Question], feed: SampleFeed, *, wanted: int
    ) -> None:
        """`question` gives the question of a problem's id, or raises TaskError.

        `wanted`: the oldest version that will be asked for.
        """
        self._context, self._question = context, question
        algorithm = context.spec.algorithm
        self._groups, self._size = algorithm.groups, algorithm.group_size
        self._states, self._oldest_wanted = States.of_run(context.store, context.run), wanted
        self.scores: dict[
            int, RankingScore
        ] = {}  # by iteration: how well its groups were ranked before they were generated
        self._ahead: dict[int, _IterationLengths] = {}  # lengths from fit samples
        self._ledger: dict[int, _IterationLengths] = {}  # lengths from the ledger; complete before `_trained`
        self._learned: dict[int, _IterationLengths] = {}  # iterations that were learned ahead of the ledger
        self._changed = threading.Condition()
        self._asked = threading.Event()
        self._closed = False
        self._samples = feed.subscribe(self._wanted, self._asked)
        self._thread = Background(self._run, "ranker")

    def open(self) -> Ranking:
        """Load the ranker to begin with, and start the thread. Return itself."""
        ranker = self._begin(self._oldest_wanted)
        self.begins = ranker.version  # the first iteration that it has not learned from
        self._rankers = {ranker.version: ranker}
        self._newest = self._trained = self._stored = ranker.version
        self._thread.start()
        return self

    def at(self, version: int) -> Ranker:
        """Wait for the ranker that has learned from all iterations before `version`, and return it."""
        wait = self._context.wait(
            f"samples of iteration {version - 1} (the ranker has learned from {self._newest})",
            unblocked_by="the generators",
        )
        with self._changed:
            while version not in self._rankers:
                self._context.check_stop()
                self._thread.check()
                wait.check()
                self._asked.set()
                self._changed.wait(_POLL_S)
            for old in [number for number in self._rankers if number < version]:
                del self._rankers[old]
            return self._rankers[version]

    def trained(self, step: StepRecord) -> None:
        """Take a step of the ledger; each comes once and in order. The ranker learns from its samples."""
        with self._changed:
            if step.iteration < self._trained:
                return  # the ranker that was loaded has learned from it
            iteration = self._ledger.setdefault(step.iteration, {})
            for group, index, told in self._rows(step):
                iteration.setdefault(group, {}).setdefault(index, told)
            if step.last_of_iteration:
                self._close(step.iteration)
        self._asked.set()

    def reached(self, version: int) -> None:
        """All iterations before `version` are trained.

        Samples of them that the ledger has lost are not learned.
        """
        with self._changed:
            if version > self._trained:
                self._close(version - 1)
        self._asked.set()

    def _note_read(self, count: int) -> None:
        """Count prompts that the backbone has read, by which others see that the feeder goes on."""
        counters = self._context.heart.counters
        counters["ranker_prompts"] = counters.get("ranker_prompts", 0.0) + count

    def key(self, version: int) -> str:
        """Return the key of a version in the store."""
        return self._states.key(version)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._asked.set()
        self._thread.join()

    def _rows(self, step: StepRecord) -> list[tuple[int, int, _Told]]:
        """Return the step's samples of its own iteration's groups, without those of resampled groups."""
        columns = (
            trained_first(step, self._context.spec.algorithm), step.groups, step.indexes, step.lengths,
            step.predicted,
        )  # fmt: skip
        rows = zip(*(column.tolist() for column in columns), step.problem_ids, strict=True)
        return [
            (group, index, _Told(length, predicted, problem))
            for is_first, group, index, length, predicted, problem in rows
            if is_first and self._is_first(group)
        ]

    def _is_first(self, group: int) -> bool:
        return group >= 0 and not round_of(
            group
        )  # resampled groups are left out: each version learns from equally many groups

    def _close(self, iteration: int) -> None:
        """Note that an iteration is trained. If it was learned ahead with other samples, learn it again."""
        lost = [number for number in range(self._trained, iteration + 1) if not self._ledger.get(number)]
        if lost:
            self._context.log.warning(
                "the ledger has no steps of iterations %d to %d: the ranker learns nothing from them",
                lost[0], lost[-1],
            )  # fmt: skip
        for number in range(self._trained, iteration + 1):
            found = self._ledger.setdefault(number, {})
            if number < self._newest and self._learned.get(number) != found:
                self._forget_from(number)
        self._trained = iteration + 1
        needed = min(self._trained, self._newest)
        for known in (self._ahead, self._learned):
            for old in [number for number in known if number < needed]:
                del known[old]
        for old in [number for number in self._ledger if number < self._newest]:
            del self._ledger[old]
        for old in [number for number in self._rankers if number < needed - kept_versions(self._context)]:
            del self._rankers[old]  # who asks for a version has seen its iterations in the ledger

    def _forget_from(self, iteration: int) -> None:
        """Drop the versions that have learned from an iteration: it was trained with other samples."""
        self._rankers = {number: one for number, one in self._rankers.items() if number <= iteration}
        self._learned = {number: one for number, one in self._learned.items() if number < iteration}
        self._newest = iteration

    def _begin(self, wanted: int) -> Ranker:
        """Load the newest stored version up to `wanted`; without one, the ranker that the run starts with."""
        spec = self._context.spec
        backbone = backbone_of(spec.lengths.backbone, self._note_read)
        for number in reversed([n for n in self._states.numbers() if n <= wanted]):
            try:
                return self._states.get(number, backbone)
            except (RankerError, Missing) as error:
                self._context.log.warning("%s; an older ranker is tried, and learns what it lacks", error)
        if spec.lengths.start:
            return start_from(spec.lengths.start, self._context.store, backbone)
        return Ranker.fresh(spec.seed, backbone, typical=max(2.0, spec.sampling.max_tokens / 8))

    def _run(self) -> None:
        if self._newest == 0:
            self._keep(self._rankers[0])
        while not self._closed:
            self._asked.wait(_POLL_S)
            self._asked.clear()
            self._take()
            while not self._closed and self._learn_next():
                self._keep_trained()
            self._keep_trained()

    def _wanted(self, taken: AdmittedSample) -> tuple[int, int, int, _Told] | None:
        """Pick a fit training sample. Called in the feed's thread."""
        sample = taken.sample
        if taken.fault or sample.purpose != TRAIN or not self._is_first(sample.group):
            return None
        if self._context.spec.algorithm.order == "arrival":
            return None  # only the ledger says which iteration trains it
        predicted = float(np.float32(sample.predicted))  # as the ledger has it
        told = _Told(sample.true_length, predicted, sample.problem_id)
        return sample.iteration, sample.group, sample.index, told

    def _take(self) -> None:
        found = self._samples.take()
        with self._changed:
            for iteration, group, index, told in found:
                if iteration >= max(self._newest, self._trained):
                    self._ahead.setdefault(iteration, {}).setdefault(group, {}).setdefault(index, told)

    def _learn_next(self) -> bool:
        """Learn from the next iteration, if all of it is known. Return whether to go on."""
        with self._changed:
            number, ranker = self._newest, self._rankers[self._newest]
            iteration = self._ledger.get(number) if number < self._trained else self._whole(number)
        if iteration is None:
            return False
        learned, score = self._learned_from(ranker, iteration)
        with self._changed:
            if number < self._trained and self._ledger.get(number) != iteration:
                return True  # meanwhile the ledger said that it was trained otherwise
            self._rankers[learned.version] = learned
            self._newest = learned.version
            if number >= self._trained:
                self._learned[number] = iteration
            else:
                self._ledger.pop(number, None)
            if score is not None:
                self.scores[number] = score
            for old in [one for one in self.scores if one < number - _KEPT]:
                del self.scores[old]
            self._changed.notify_all()
        return True

    def _whole(self, number: int) -> _IterationLengths | None:
        """Return an iteration if all of its samples are there; else None."""
        iteration = self._ahead.get(number, {})
        if len(iteration) < self._groups or any(len(group) < self._size for group in iteration.values()):
            return None
        return {group: dict(members) for group, members in iteration.items()}

    def _learned_from(
        self, ranker: Ranker, iteration: _IterationLengths
    ) -> tuple[Ranker, RankingScore | None]:
        began = time.thread_time()
        answered: list[Answered] = []
        predicted: list[float] = []
        for _, members in sorted(iteration.items()):
            told = [one for _, one in sorted(members.items())]
            try:
                question = self._question(told[0].problem_id)
            except TaskError as error:
                self._context.log.warning("%s; the ranker does not learn from it", error)
                continue
            if len(told) == self._size:
                answered.append(Answered(question, [one.length for one in told]))
                predicted.append(told[0].predicted)
        learned = ranker.learned(answered)
        counters = self._context.heart.counters
        counters["ranker"] = learned.version
        counters["ranker_cpu_s"] = counters.get("ranker_cpu_s", 0.0) + time.thread_time() - began
        score = score_of(predicted, [group.lengths for group in answered]) if answered else None
        return learned, score

    def _keep_trained(self) -> None:
        """Store the versions whose iterations are all in the ledger. Later ones may be learned again."""
        while True:
            with self._changed:
                number = self._stored + 1
                ranker = self._rankers.get(number) if number <= self._trained else None
                if ranker is None and number <= min(self._trained, self._newest):
                    self._stored = number  # it was dropped, since nobody needs it any more
                    continue
            if ranker is None:
                return
            self._keep(ranker)
            self._stored = number

    def _keep(self, ranker: Ranker) -> None:
        try:
            self._states.put(ranker.version, ranker)
            if ranker.version % _KEPT == 0:  # only now and then, since it lists the store
                self._states.collect(kept_versions(self._context))
        except StoreError as error:  # the version can be learned from the log again
            self._context.log.warning("ranker %d can't be stored: %s", ranker.version, error)
