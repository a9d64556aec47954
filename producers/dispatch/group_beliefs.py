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
from weakref import WeakSet

import numpy as np

from producers.dispatch.beliefs import KEPT_PAIRS, LEVELS, QUANTILES, Beliefs, Kin, Pair
from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.drift import Drift
from producers.dispatch.drift_seen import SeenLengths, drift_of
from producers.dispatch.every_nth import EveryNth
from producers.dispatch.jobs import SampleJob
from schemas.identity import SampleKey

_MOST_PRIORS = 4096  # of the samples that come together
_SAME = 1e-3  # in log units: if there were more, so near predictions share a prior
_LOOKED_AT = 256  # samples that tell of a drift between two choices
_LOOKED_AT_CLOSELY = 1024  # ... and before a choice
_LEVELS: list[float] = LEVELS.tolist()
_MIDDLE = QUANTILES // 2


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
        for job, place in zip(jobs, which.tolist(), strict=True):
            one = self._known[job.key] = _OpenJob(job, priors[place])
            self._groups.setdefault(job.prompt.group, _Group()).open[job.key] = one

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
        from producers.dispatch.corrected import declared_each  # compiled: only who plans needs it

        return list(declared_each(*self._readings(keys, tokens), z).tolist())

    def rows_of(self, keys: Sequence[SampleKey]) -> tuple[np.ndarray, np.ndarray]:
        """Return the beliefs of jobs, a row each, and by how much they make their predictions longer."""
        from producers.dispatch.corrected import corrected_rows

        priors, levels, samples = self._readings(keys, [0.0] * len(keys))
        rows = corrected_rows(priors, levels, samples)
        factors = rows[:, _MIDDLE] / np.maximum(priors[samples[:, 0].astype(int), _MIDDLE], 1.0)
        return rows, np.where(samples[:, 2] > 0, factors, 1.0)

    def _readings(
        self, keys: Sequence[SampleKey], tokens: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return priors, the levels, and how each job's prior is read, for `corrected`."""
        known = self._known
        rest = 1 - self.beliefs.rho
        places: dict[_Prior, int] = {}
        rows: list[tuple[float, ...]] = []
        for key, has in zip(keys, tokens, strict=True):
            one = known[key]
            spread = math.sqrt(one.variance + rest) if one.variance >= 0 else 0.0
            rows.append((places.setdefault(one.prior, len(places)), one.mean, spread, has))
        priors = [prior.row for prior in places]
        table = priors[0].reshape(1, -1) if len(priors) == 1 else np.stack(priors)
        return table, LEVELS, np.array(rows, float)

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
        self._follow(self._drift_seen(board, _LOOKED_AT_CLOSELY))
        numbers = self._groups if keys is None else dict.fromkeys(group for group, _ in keys)
        for number in numbers:
            if (group := self._groups.get(number)) is not None:
                self._correct(board, group)

    def drift_seen(self, board: Board) -> Drift:
        """Return the drift by all that is seen now. The beliefs follow it at the next `look`."""
        return self._drift_seen(board, _LOOKED_AT)

    def _drift_seen(self, board: Board, most: int) -> Drift:
        if not (self._corrects and self._known) or self.beliefs.exact:
            return Drift()
        step = -(-len(self._done.kept) // most) or 1
        scale = step * self._done.step
        done = self._done.kept[::step]
        rows = [(said, float(length), True, weight * scale) for said, length, weight in done]
        keys, step = _some_running(board, most)
        for generator, key in keys:
            one = self._known.get(key)
            if one is not None:  # also if it is as long as believed: that speaks against a drift
                tokens = generator.tokens(key)
                rows.append((one.job.prompt.predicted, tokens, False, self._weight(one.job) * step))
        if not rows:
            return Drift()  # a plan for each drift that may come would gain nothing
        columns = np.array(rows, float).reshape(-1, 4).T
        return drift_of(self.beliefs, SeenLengths(columns[0], columns[1], columns[2] > 0, columns[3]))

    def _weight(self, job: SampleJob) -> float:
        """Return how much a sample tells of all: less where others of its group tell the same."""
        return 1.0 / (1 + (job.prompt.size - 1) * self.beliefs.rho)

    def _follow(self, drift: Drift) -> None:
        if not self._known or drift == self.drift:
            return
        self.drift = drift
        priors = list(self._priors)
        rows = self.beliefs.drifted(np.array([one.predicted for one in priors]), drift)
        for one, row in zip(priors, rows, strict=True):
            one.row, one.shortest = row, float(row[0])

    def kin(self, jobs: Sequence[SampleJob]) -> Kin | None:
        """Return the model of these jobs' scores; None if samples of a group say nothing of each other."""
        rho = self.beliefs.rho
        if not rho:
            return None
        known = [self._known[job.key] for job in jobs]
        alone = np.array([job.prompt.size <= 1 for job in jobs])
        mean = np.array([one.mean for one in known])
        variance = np.array([one.variance for one in known])
        variance = np.where(variance >= 0, variance, np.where(alone, 0.0, rho))
        own = np.where(alone, 1.0, math.sqrt(1 - rho))
        return Kin(np.array([job.prompt.group for job in jobs]), mean, np.sqrt(variance), own)

    def _correct(self, board: Board, group: _Group) -> list[SampleKey]:
        """Correct a group's beliefs by its finished samples, and by running ones that are long.

        Return its jobs.
        """
        rho = self.beliefs.rho
        if not (rho and self._corrects and group.open):
            return []
        done = group.scores()
        if len(group.open) + len(done) < 2:
            return []
        floors = _floors(board, group.open)
        if not floors and not done:
            for one in group.open.values():
                one.mean, one.variance = 0.0, -1.0
            return []
        of_all, without = common_parts(rho, done, [floor for _, floor in floors])
        own = {key: common for (key, _), common in zip(floors, without, strict=True)}
        for key, one in group.open.items():
            # its own length must not count twice
            one.mean, one.variance = own.get(key, of_all)
            if key in board.waiting:
                board.waiting.reorder(key, self.expected_length(one.job))
        return list(group.open)


def _floors(board: Board, jobs: Mapping[SampleKey, _OpenJob]) -> list[tuple[SampleKey, float]]:
    """Return the scores that running jobs exceed already, where these tell anything."""
    return [
        (key, _score(prior.row, tokens))
        for key, generator in board.running(jobs)
        if (tokens := generator.tokens(key)) > (prior := jobs[key].prior).shortest
    ]


def _some_running(board: Board, most: int) -> tuple[list[tuple[BoardGenerator, SampleKey]], int]:
    """Return running jobs, evenly spaced and about `most` if there are more, and for how many each stands."""
    step = len(board.home) // most or 1
    found, first = [], 0
    for generator in board.generators.values():
        keys = list(generator.running)[first::step]
        first = (first - len(generator.running)) % step
        if keys:
            generator.advance(board.now)
            found += [(generator, key) for key in keys]
    return found, step


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


def common_part(rho: float, done: Sequence[float], floors: Sequence[float]) -> tuple[float, float]:
    """Return mean and variance of a group's common part.

    `done`: scores of finished samples. `floors`: scores that running samples exceed. The floors are taken
    into account one after the other; each result is replaced by the normal distribution of its mean and
    variance.
    """
    return common_parts(rho, done, floors)[0]


def common_parts(
    rho: float, done: Sequence[float], floors: Sequence[float]
) -> tuple[tuple[float, float], list[tuple[float, float]]]:
    """Return `common_part`, and for each floor the same without this floor."""
    count = len(done)
    variance = rho * (1 - rho) / (1 - rho + rho * count)
    mean = rho * sum(done) / (1 - rho + rho * count)
    without: list[tuple[float, float]] = []
    for floor in floors:
        without = [_exceeds(rho, *common, floor) for common in without]
        without.append((mean, variance))
        mean, variance = _exceeds(rho, mean, variance, floor)
    return (mean, max(variance, 1e-9)), [(mean, max(variance, 1e-9)) for mean, variance in without]


def _exceeds(rho: float, mean: float, variance: float, floor: float) -> tuple[float, float]:
    """Return mean and variance of the common part, given that a sample's score exceeds `floor`."""
    deviation = math.sqrt(variance + 1 - rho)
    above = (floor - mean) / deviation
    share = 0.5 * math.erfc(above / math.sqrt(2))
    if share < 1e-9:
        hazard = above + 1 / above
    else:
        hazard = math.exp(-0.5 * above * above) / math.sqrt(2 * math.pi) / share
    gain = variance / deviation
    return mean + gain * hazard, variance - gain * gain * hazard * (hazard - above)
