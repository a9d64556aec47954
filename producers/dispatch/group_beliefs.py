"""Beliefs of each job's length, corrected while other samples of its group finish.

The ranker sees a prompt, not a sample: it predicts the same for all samples of a group, and its errors on
them are alike. So a finished sample tells of the others, and one that is already longer than x tells
something, too:

    score of a member = common part + own part      common ~ N(0, rho), own ~ N(0, 1 - rho)
    k are done, mean score m:  another's is  N(rho k m / (1 + rho (k - 1)),  1 - rho² k / (1 + rho (k - 1)))

with rho as `Beliefs` measured it. With rho 0 nothing is corrected.

The ranker may also err as never before: all beliefs follow the drift that is seen (`drift.py`).

A corrected belief is not kept, only the two numbers that it follows from. Samples of one prediction share
one prior; of very many predictions, those that differ by less than a thousandth share one, too.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakSet

import numpy as np

from producers.dispatch.beliefs import KEPT_PAIRS, LEVELS, QUANTILES, Beliefs, Kin, Pair
from producers.dispatch.board import Board
from producers.dispatch.common_part import common_parts
from producers.dispatch.drift import Drift
from producers.dispatch.drift_seen import SeenLengths, drift_of
from producers.dispatch.every_nth import EveryNth
from producers.dispatch.jobs import SampleJob
from schemas.identity import SampleKey
from schemas.messages import Prompt

_MOST_PRIORS = 4096  # of the samples that come together
_SAME = 1e-3  # in log units: if there were more, so near predictions share a prior
_LOOKED_AT = 256  # samples that tell of a drift between two choices
_LOOKED_AT_CLOSELY = 1024  # ... and before a choice
_LEVELS: list[float] = LEVELS.tolist()
_MIDDLE = QUANTILES // 2


@cache
def _compiled() -> Any:
    """Import the compiled module when first needed, by a policy that plans."""
    from producers.dispatch import corrected

    return corrected


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Prior:
    """The belief of all samples of one prediction: lengths at `LEVELS`."""

    predicted: float
    row: np.ndarray  # by prediction and drift
    shortest: float  # of `row`


@dataclass(eq=False, slots=True)
class _OpenJob:
    """A job that is not done, and what is believed of its length."""

    job: SampleJob
    prior: _Prior
    mean: float = 0.0  # of the group's common part
    variance: float = -1.0  # of the same; below 0: nothing is known of the group


@dataclass(eq=False, slots=True)
class _Group:
    """The samples of one prompt."""

    open: dict[SampleKey, _OpenJob] = field(default_factory=dict)
    done: list[float] = field(default_factory=list)  # scores of finished samples
    fresh: list[tuple[int, np.ndarray]] = field(default_factory=list)  # without a score: length and belief
    pairs: list[Pair] = field(default_factory=list)  # pairs that `beliefs` has not observed yet

    @property
    def tells(self) -> bool:
        """Whether any of its samples may tell of another one that is open."""
        return bool(self.open) and len(self.open) + len(self.done) + len(self.fresh) >= 2

    def scores(self) -> list[float]:
        """Return the scores of finished samples. Only here are new ones computed: often none are needed."""
        self.done += [_score(prior, length) for length, prior in self.fresh]
        self.fresh.clear()
        return self.done


class _Rows(Mapping[SampleKey, np.ndarray]):
    """The beliefs by job, each computed when it is asked for."""

    def __init__(self, known: Mapping[SampleKey, _OpenJob], beliefs: Beliefs) -> None:
        self._known, self._beliefs = known, beliefs

    def __getitem__(self, key: SampleKey) -> np.ndarray:
        one = self._known[key]
        if one.variance < 0:
            return one.prior.row
        return _row(one.prior.row, self._beliefs.rho, one.mean, one.variance)

    def __iter__(self) -> Iterator[SampleKey]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class GroupBeliefs:
    """Beliefs by job: arrays of lengths at `LEVELS`, ascending. `corrects`: whether they are corrected."""

    def __init__(self, beliefs: Beliefs, *, corrects: bool = True) -> None:
        self.beliefs, self._corrects = beliefs, corrects
        self._known: dict[SampleKey, _OpenJob] = {}
        self.row: Mapping[SampleKey, np.ndarray] = _Rows(self._known, beliefs)
        self._groups: dict[int, _Group] = {}
        self._told: dict[int, _Group] = {}  # groups with pairs that `beliefs` has not observed
        self._longest: Pair | None = None  # of those pairs
        self._priors: WeakSet[_Prior] = WeakSet()  # of open jobs
        self.drift = Drift()
        self._is_compiled = False  # whether the compiled code is there
        # since jobs came: predicted, length and weight of finished samples
        self._done: EveryNth[tuple[float, int, float]] = EveryNth(_LOOKED_AT_CLOSELY)

    def admitted(self, jobs: Sequence[SampleJob]) -> None:
        """Add jobs. The pairs of finished samples are learned first."""
        self._observe()
        self._done.clear()
        self.drift = Drift()
        given = np.array([job.prompt.predicted for job in jobs])
        predicted, which = np.unique(given, return_inverse=True)
        if len(predicted) > _MOST_PRIORS:
            near = np.round(np.log(np.maximum(given, 1.0)) / _SAME)
            near, which = np.unique(near, return_inverse=True)
            predicted = np.exp(near * _SAME)
        rows = self.beliefs.quantiles(predicted)
        priors = [
            _Prior(said, row, float(row[0])) for said, row in zip(predicted.tolist(), rows, strict=True)
        ]
        self._priors.update(priors)
        known, groups = self._known, self._groups
        for job, place in zip(jobs, which.tolist(), strict=True):
            key = job.key
            group = groups.get(key[0])
            if group is None:
                group = groups[key[0]] = _Group()
            known[key] = group.open[key] = _OpenJob(job, priors[place])

    def _observe(self) -> None:
        """Learn the pairs of finished samples: the newest groups' if there are many, and the longest."""
        pairs: list[list[Pair]] = []
        count = 0
        for number in sorted(self._told, reverse=True):
            if count < KEPT_PAIRS:
                pairs.append(self._told[number].pairs)
                count += len(pairs[-1])
        if count >= KEPT_PAIRS and self._longest is not None:
            pairs.append([self._longest])
        self.beliefs.observe(pairs[::-1])
        self._longest = None
        for number, group in self._told.items():
            group.pairs = []
            if not group.open:
                self._groups.pop(number, None)
        self._told.clear()

    def expected_length(self, job: SampleJob) -> float:
        """Return a job's predicted length, corrected."""
        one = self._known.get(job.key)
        if one is None or one.variance < 0:
            return job.prompt.predicted
        row = one.prior.row
        spread = math.sqrt(one.variance + 1 - self.beliefs.rho)
        expected = _length(row, one.mean + spread * _LEVELS[_MIDDLE])
        return job.prompt.predicted * expected / max(row.item(_MIDDLE), 1.0)

    def declared(self, keys: Sequence[SampleKey], tokens: Sequence[float], z: float) -> list[float]:
        """Return the declared lengths of jobs that have so many tokens: quantile z of their beliefs."""
        found: list[float] = _compiled().declared_each(*self._readings(keys, tokens), z).tolist()
        return found

    def rows_of(self, jobs: Sequence[SampleJob]) -> tuple[np.ndarray, np.ndarray, Kin | None]:
        """Return the beliefs of jobs, a row each, by how much they make predictions longer, and the `Kin`."""
        priors, levels, rest, samples = self._readings([job.key for job in jobs], [0.0] * len(jobs))
        rows = _compiled().corrected_rows(priors, levels, rest, samples)
        factors = rows[:, _MIDDLE] / np.maximum(priors[samples[0].astype(int), _MIDDLE], 1.0)
        return rows, np.where(samples[2] >= 0, factors, 1.0), self._kin(jobs, samples[1], samples[2])

    def _readings(
        self, keys: Sequence[SampleKey], tokens: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
        """Return priors, the levels, and how each job's prior is read, for `corrected`."""
        known = self._known
        ones = [known[key] for key in keys]
        places = {prior: place for place, prior in enumerate(dict.fromkeys([one.prior for one in ones]))}
        priors = [prior.row for prior in places]
        table = priors[0].reshape(1, -1) if len(priors) == 1 else np.stack(priors)
        samples = np.empty((4, len(ones)))
        samples[0] = [places[one.prior] for one in ones]
        samples[1] = [one.mean for one in ones]
        samples[2] = [one.variance for one in ones]
        samples[3] = tokens
        return table, LEVELS, 1 - self.beliefs.rho, samples

    def forget(self, job: SampleJob) -> None:
        """Drop a job."""
        self._known.pop(job.key, None)
        number = job.prompt.group
        if (group := self._groups.get(number)) is not None:
            group.open.pop(job.key, None)
            if not group.open and not group.pairs:
                del self._groups[number]

    def finished(
        self, board: Board, job: SampleJob, length: int, *, of_running: bool = True
    ) -> list[SampleKey]:
        """Note that a sample is done. Return the jobs whose beliefs have changed.

        `of_running`: whether beliefs of running jobs are needed before the next `look`; if not, a group
        without waiting jobs is not corrected now.
        """
        number, key = job.prompt.group, job.key
        group = self._groups.get(number)
        if group is None or (one := group.open.pop(key, None)) is None:
            return []
        del self._known[key]
        pair = job.prompt.predicted, float(length)
        group.pairs.append(pair)
        group.fresh.append((length, one.prior.row))
        self._told[number] = group
        if self._longest is None or length > self._longest[1]:
            self._longest = pair
        self._done.add((job.prompt.predicted, length, self._weight(job)))
        if not of_running and not any(other in board.waiting for other in group.open):
            return []
        return self._correct(board, group)

    def look(self, board: Board, keys: Collection[SampleKey] | None = None) -> None:
        """Let all beliefs follow the drift, and correct them by how long the running samples are already.

        `keys`: jobs whose groups are corrected now; None: of all groups. The others are corrected as soon as
        one of their samples is done.
        """
        has_drifted = self._follow(self._drift_seen(board, _LOOKED_AT_CLOSELY))
        numbers = self._groups if keys is None else dict.fromkeys(group for group, _ in keys)
        groups = [group for number in numbers if (group := self._groups.get(number)) is not None]
        self._correct_all(board, [group for group in groups if group.tells], has_drifted=has_drifted)

    def drift_seen(self, board: Board) -> Drift:
        """Return the drift by all that is seen now. The beliefs follow it at the next `look`."""
        return self._drift_seen(board, _LOOKED_AT)

    def _drift_seen(self, board: Board, most: int) -> Drift:
        if not (self._corrects and self._known) or self.beliefs.exact:
            return Drift()
        step = -(-len(self._done.kept) // most) or 1
        scale = step * self._done.step
        done = self._done.kept[::step]
        # a job that is as long as believed counts, too: it speaks against a drift
        prompts, tokens, step = _some_running(board, most)
        if not (done or prompts):
            return Drift()  # a plan for each drift that may come would gain nothing
        columns = np.empty((3, len(done) + len(prompts)))  # predicted, tokens, weight
        columns[:, : len(done)] = np.array(done).reshape(-1, 3).T
        columns[2, : len(done)] *= scale
        columns[0, len(done) :] = [prompt.predicted for prompt in prompts]
        columns[1, len(done) :] = tokens
        sizes = np.array([prompt.size for prompt in prompts])
        columns[2, len(done) :] = 1.0 / (1 + (sizes - 1) * self.beliefs.rho) * step
        return drift_of(
            self.beliefs,
            SeenLengths(columns[0], columns[1], np.arange(columns.shape[1]) < len(done), columns[2]),
        )

    def _weight(self, job: SampleJob) -> float:
        """Return how much a sample tells of all: less where others of its group tell the same."""
        return 1.0 / (1 + (job.prompt.size - 1) * self.beliefs.rho)

    def _follow(self, drift: Drift) -> bool:
        """Let all beliefs follow a drift. Return whether it is another one than before."""
        if not self._known or drift == self.drift:
            return False
        self.drift = drift
        priors = list(self._priors)
        rows = self.beliefs.drifted(np.array([one.predicted for one in priors]), drift)
        for one, row in zip(priors, rows, strict=True):
            one.row, one.shortest = row, float(row[0])
        return True

    def _kin(self, jobs: Sequence[SampleJob], mean: np.ndarray, variance: np.ndarray) -> Kin | None:
        """Return the model of these jobs' scores; None if samples of a group say nothing of each other."""
        rho = self.beliefs.rho
        if not rho:
            return None
        alone = np.array([job.prompt.size <= 1 for job in jobs])
        variance = np.where(variance >= 0, variance, np.where(alone, 0.0, rho))
        own = np.where(alone, 1.0, math.sqrt(1 - rho))
        return Kin(np.array([job.prompt.group for job in jobs]), mean, np.sqrt(variance), own)

    def _correct_all(self, board: Board, groups: Sequence[_Group], *, has_drifted: bool) -> None:
        """Do for many groups what `_correct` does for one."""
        if not (self.beliefs.rho and self._corrects and groups):
            return
        self._is_compiled = True
        ones = [one for group in groups for one in group.open.values()]
        places = {prior: place for place, prior in enumerate(dict.fromkeys([one.prior for one in ones]))}
        samples = np.full((2, len(ones)), -1.0)
        samples[0] = [places[one.prior] for one in ones]
        samples[1] = board.tokens([one.job.key for one in ones])
        scores = [group.scores() for group in groups]
        known = np.empty((3, len(groups)))
        known[0] = [len(group.open) for group in groups]
        known[1], known[2] = [len(one) for one in scores], [sum(one) for one in scores]
        priors = np.stack([prior.row for prior in places])
        means, variances = (
            _compiled().corrected_parts(self.beliefs.rho, priors, LEVELS, samples, known).tolist()
        )
        changed: list[_OpenJob] = []
        for one, mean, variance in zip(ones, means, variances, strict=True):
            if has_drifted or one.mean != mean or one.variance != variance:
                one.mean, one.variance = mean, variance
                changed.append(one)
        if waiting := board.waiting:
            waiting.reorder(
                [(one.job.key, self.expected_length(one.job)) for one in changed if one.job.key in waiting]
            )

    def _common_parts(self, done: list[float], floors: list[float]) -> tuple[list[float], list[float]]:
        """Return means and variances of a group's common part, by `common_parts`."""
        rho, count, total = self.beliefs.rho, len(done), float(sum(done))
        if self._is_compiled:
            means, variances = _compiled().parts_of_one(rho, count, total, np.array(floors, float)).tolist()
        else:  # nobody waits here for the compiler
            means, variances = [0.0] * (len(floors) + 1), [0.0] * (len(floors) + 1)
            common_parts(rho, (count, total), floors, means, variances)
        return means, variances

    def _correct(self, board: Board, group: _Group) -> list[SampleKey]:
        """Correct a group's beliefs by its finished samples, and by running ones that are long.

        Return its jobs.
        """
        rho = self.beliefs.rho
        if not (rho and self._corrects and group.tells):
            return []
        done = group.scores()
        floors = _floors(board, group.open)
        if not floors and not done:
            for one in group.open.values():
                one.mean, one.variance = 0.0, -1.0
            return []
        means, variances = self._common_parts(done, [floor for _, floor in floors])
        places = {key: place for place, (key, _) in enumerate(floors)}
        for key, one in group.open.items():
            place = places.get(key, -1)  # its own length must not count twice
            one.mean, one.variance = means[place], variances[place]
        if board.waiting:
            fresh = [
                (key, self.expected_length(one.job))
                for key, one in group.open.items()
                if key in board.waiting
            ]
            board.waiting.reorder(fresh)
        return list(group.open)


def _floors(board: Board, jobs: Mapping[SampleKey, _OpenJob]) -> list[tuple[SampleKey, float]]:
    """Return the scores that running jobs exceed already, where these tell anything."""
    return [
        (key, _score(one.prior.row, tokens))
        for (key, one), tokens in zip(jobs.items(), board.tokens(jobs), strict=True)
        if tokens > one.prior.shortest
    ]


def _some_running(board: Board, most: int) -> tuple[list[Prompt], list[float], int]:
    """Return running jobs' prompts and tokens, and for how many each stands.

    The jobs are evenly spaced, and about `most` if there are more.
    """
    step = len(board.home) // most or 1
    prompts: list[Prompt] = []
    tokens: list[float] = []
    first = 0
    for generator in board.generators.values():
        keys = list(generator.running)[first::step]
        first = (first - len(generator.running)) % step
        if keys:
            generator.advance(board.now)
            prompts += [generator.running[key].prompt for key in keys]
            tokens += generator.tokens_of(keys)
    return prompts, tokens, step


def _score(prior: np.ndarray, length: float) -> float:
    """Return the score of a length in a belief, as `np.interp` does: that takes longer for one number."""
    place = bisect.bisect_right(prior, length) - 1
    if place < 0:
        return _LEVELS[0]
    if place >= len(_LEVELS) - 1:
        return _LEVELS[-1]
    low, high = prior.item(place), prior.item(place + 1)
    return (_LEVELS[place + 1] - _LEVELS[place]) / (high - low) * (length - low) + _LEVELS[place]


def _length(prior: np.ndarray, score: float) -> float:
    """Return the length that has this score in a belief."""
    place = bisect.bisect_right(_LEVELS, score) - 1
    if place < 0:
        return float(prior.item(0))
    if place >= len(_LEVELS) - 1:
        return float(prior.item(-1))
    low, high = prior.item(place), prior.item(place + 1)
    return float((high - low) / (_LEVELS[place + 1] - _LEVELS[place]) * (score - _LEVELS[place]) + low)


def _row(prior: np.ndarray, rho: float, mean: float, variance: float) -> np.ndarray:
    """Return the belief of a sample whose group's common part has this mean and variance."""
    return np.interp(mean + math.sqrt(variance + 1 - rho) * LEVELS, LEVELS, prior)
