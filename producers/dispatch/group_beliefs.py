"""Beliefs of each job's length, corrected while other samples of its group finish.

The ranker sees a prompt, not a sample: it predicts the same for all samples of a group, and its errors on
them are alike. So a finished sample tells of the others, and one that is already longer than x tells
something, too:

    score of a member = common part + own part      common ~ N(0, rho), own ~ N(0, 1 - rho)
    k are done, mean score m:  another's is  N(rho k m / (1 + rho (k - 1)),  1 - rho² k / (1 + rho (k - 1)))

with rho as `Beliefs` measured it. With rho 0 nothing is corrected.

The ranker may also err as never before: all beliefs follow the drift that is seen (`drift.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from producers.dispatch.beliefs import LEVELS, Beliefs, Kin, Pair
from producers.dispatch.board import Board
from producers.dispatch.drift import Drift, SeenLengths, drift_of
from producers.dispatch.jobs import SampleJob
from schemas.identity import SampleKey


@dataclass
class _Group:
    """The samples of one prompt."""

    open: dict[SampleKey, SampleJob] = field(default_factory=dict)
    done: list[float] = field(default_factory=list)  # scores of finished samples
    fresh: list[tuple[int, np.ndarray]] = field(default_factory=list)  # without a score: length and belief
    pairs: list[Pair] = field(default_factory=list)  # pairs that `beliefs` has not observed yet

    def scores(self) -> list[float]:
        """Return the scores of finished samples. Only here are new ones computed: often none are needed."""
        self.done += [float(np.interp(length, prior, LEVELS)) for length, prior in self.fresh]
        self.fresh.clear()
        return self.done


class GroupBeliefs:
    """Beliefs by job: arrays of equally likely lengths, ascending. `corrects`: whether they are corrected."""

    def __init__(self, beliefs: Beliefs, *, corrects: bool = True) -> None:
        self.beliefs, self._corrects = beliefs, corrects
        self.row: dict[SampleKey, np.ndarray] = {}
        self._said: dict[SampleKey, np.ndarray] = {}  # the belief by the prediction alone
        self._prior: dict[SampleKey, np.ndarray] = {}  # the belief by prediction and drift
        self._common: dict[
            SampleKey, tuple[float, float]
        ] = {}  # mean and deviation of the group's common part
        self._groups: dict[int, _Group] = {}
        self.drift = Drift()
        self._done: list[tuple[float, int, float]] = []  # since jobs came: predicted, length and weight

    def admitted(self, jobs: Sequence[SampleJob]) -> None:
        """Add jobs. The pairs of finished samples are learned first."""
        self.beliefs.observe([group.pairs for group in self._groups.values() if group.pairs])
        for group in self._groups.values():
            group.pairs = []
        self._groups = {number: group for number, group in self._groups.items() if group.open}
        self._done.clear()
        self.drift = Drift()
        predicted, which = np.unique([job.prompt.predicted for job in jobs], return_inverse=True)
        rows = list(self.beliefs.quantiles(predicted))
        for job, one in zip(jobs, which.tolist(), strict=True):
            self._groups.setdefault(job.prompt.group, _Group()).open[job.key] = job
            self.row[job.key] = self._said[job.key] = self._prior[job.key] = rows[one]

    def expected_length(self, job: SampleJob) -> float:
        """Return a job's predicted length, corrected."""
        if job.key not in self._common:
            return job.prompt.predicted
        middle = len(LEVELS) // 2
        prior = max(self._prior[job.key][middle], 1.0)
        return float(job.prompt.predicted * self.row[job.key][middle] / prior)

    def forget(self, job: SampleJob) -> None:
        """Drop a job."""
        for known in (self.row, self._said, self._prior, self._common):
            known.pop(job.key, None)
        if (group := self._groups.get(job.prompt.group)) is not None:
            group.open.pop(job.key, None)

    def finished(
        self, board: Board, job: SampleJob, length: int, *, of_running: bool = True
    ) -> list[SampleKey]:
        """Note that a sample is done. Return the jobs whose beliefs have changed.

        `of_running`: whether beliefs of running jobs are needed before the next `look`; if not, a group
        without waiting jobs is not corrected now.
        """
        group = self._groups.get(job.prompt.group)
        if group is None or job.key not in group.open:
            return []
        prior = self._prior[job.key]
        self.forget(job)
        group.pairs.append((job.prompt.predicted, float(length)))
        group.fresh.append((length, prior))
        self._done.append((job.prompt.predicted, length, self._weight(job)))
        if not of_running and not any(key in board.waiting for key in group.open):
            return []
        return self._correct(board, group)

    def look(self, board: Board) -> None:
        """Correct all beliefs by how long the running samples are already."""
        self._follow(self.drift_seen(board))
        for group in self._groups.values():
            self._correct(board, group)

    def drift_seen(self, board: Board) -> Drift:
        """Return the drift by all that is seen now. The beliefs follow it at the next `look`."""
        if not (self._corrects and self._said) or self.beliefs.exact:
            return Drift()
        rows = [(predicted, float(length), True, weight) for predicted, length, weight in self._done]
        for generator in board.generators.values():
            for key, job in generator.running.items():
                if (tokens := generator.tokens(key)) > self._said[key][0]:
                    rows.append((job.prompt.predicted, tokens, False, self._weight(job)))
        if not rows:
            return Drift()  # a plan for each drift that may come would gain nothing
        columns = np.array(rows, float).reshape(-1, 4).T
        return drift_of(self.beliefs, SeenLengths(columns[0], columns[1], columns[2] > 0, columns[3]))

    def _weight(self, job: SampleJob) -> float:
        """Return how much a sample tells of all: less where others of its group tell the same."""
        return 1.0 / (1 + (job.prompt.size - 1) * self.beliefs.rho)

    def _follow(self, drift: Drift) -> None:
        if not self._said or drift == self.drift:
            return
        self.drift = drift
        said = {id(row): row for row in self._said.values()}  # samples of a group share one
        rows = self.beliefs.drifted(np.stack(list(said.values())), drift.shift, drift.wild)
        drifted = dict(zip(said, rows, strict=True))
        self._prior = {key: drifted[id(row)] for key, row in self._said.items()}
        self.row = dict(self._prior)

    def kin(self, jobs: Sequence[SampleJob]) -> Kin | None:
        """Return the model of these jobs' scores; None if samples of a group say nothing of each other."""
        rho = self.beliefs.rho
        if not rho:
            return None
        fresh = 0.0, math.sqrt(rho)
        common = np.array(
            [self._common.get(job.key, fresh if job.prompt.size > 1 else (0.0, 0.0)) for job in jobs]
        )
        own = np.array([math.sqrt(1 - rho) if job.prompt.size > 1 else 1.0 for job in jobs])
        return Kin(np.array([job.prompt.group for job in jobs]), common[:, 0], common[:, 1], own)

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
        floors = {
            key: float(np.interp(tokens, self._prior[key], LEVELS))
            for key in group.open
            if (tokens := board.tokens(key)) > self._prior[key][0]
        }
        if not floors and not done:
            return []
        of_all = common_part(rho, done, list(floors.values()))
        alike: dict[int, np.ndarray] = {}  # one row for each prior, since samples of a group share it
        for key, job in group.open.items():
            prior = self._prior[key]
            if key in floors:  # its own length must not count twice
                others = [floor for other, floor in floors.items() if other != key]
                common = common_part(rho, done, others)
                self.row[key] = _row(prior, rho, *common)
            else:
                common = of_all
                if id(prior) not in alike:
                    alike[id(prior)] = _row(prior, rho, *common)
                self.row[key] = alike[id(prior)]
            self._common[key] = common[0], math.sqrt(common[1])
            if key in board.waiting:
                board.waiting.reorder(key, self.expected_length(job))
        return list(group.open)


def _row(prior: np.ndarray, rho: float, mean: float, variance: float) -> np.ndarray:
    """Return the belief of a sample whose group's common part has this mean and variance."""
    return np.interp(mean + math.sqrt(variance + 1 - rho) * LEVELS, LEVELS, prior)


def common_part(rho: float, done: Sequence[float], floors: Sequence[float]) -> tuple[float, float]:
    """Return mean and variance of a group's common part.

    `done`: scores of finished samples. `floors`: scores that running samples exceed. The floors are taken
    into account one after the other; each result is replaced by the normal distribution of its mean and
    variance.
    """
    count = len(done)
    variance = rho * (1 - rho) / (1 - rho + rho * count)
    mean = rho * sum(done) / (1 - rho + rho * count)
    for floor in floors:
        deviation = math.sqrt(variance + 1 - rho)
        above = (floor - mean) / deviation
        share = 0.5 * math.erfc(above / math.sqrt(2))
        if share < 1e-9:
            hazard = above + 1 / above
        else:
            hazard = math.exp(-0.5 * above * above) / math.sqrt(2 * math.pi) / share
        gain = variance / deviation
        mean += gain * hazard
        variance -= gain * gain * hazard * (hazard - above)
    return mean, max(variance, 1e-9)
