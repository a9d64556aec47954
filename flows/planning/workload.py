"""The lengths of the prompts and answers that a run meets, and how well a ranker foretells them.

normal scores: √share · group + √(1 − share) · sample ──► quantiles of the source ──► lengths, by group
                                                                 ranker's errors ──► predictions

Drawn lengths depend on the workload, the run's settings and a seed, and on nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np

from infra.errors import Explained
from schemas.algorithm import MOST_TOKENS
from schemas.identity import SampleKey
from schemas.runspec import RunSpec

_NODES = 4096  # quantiles by which means are computed


class WorkloadError(Explained):
    """A workload says something impossible."""


class LengthSource(Protocol):
    """A distribution of lengths in tokens."""

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        """Return the lengths that these shares of all samples do not exceed."""


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths by bins: `weights[i]` of them (a share or a count) lie between `edges[i]` and the next edge."""

    edges: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise WorkloadError if this is no histogram."""
        if len(self.edges) != len(self.weights) + 1 or not self.weights:
            raise WorkloadError(
                f"a histogram of lengths needs one edge more than weights; it has {len(self.edges)} edges "
                f"and {len(self.weights)} weights"
            )
        if not all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise WorkloadError(f"the edges of a histogram of lengths must grow: {list(self.edges)[:8]}")
        if not (self.edges[0] >= 0 and self.edges[-1] <= MOST_TOKENS):
            raise WorkloadError(
                f"the edges of a histogram of lengths must lie between 0 and {MOST_TOKENS} tokens; "
                f"they go from {self.edges[0]:g} to {self.edges[-1]:g}"
            )
        if not (all(weight >= 0 for weight in self.weights) and 0 < math.fsum(self.weights) < math.inf):
            raise WorkloadError("the weights of a histogram of lengths must be at least 0, and not all 0")

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        below = np.concatenate([[0.0], np.cumsum(self.weights)]) / math.fsum(self.weights)
        return np.interp(shares, below, self.edges)


@dataclass(frozen=True)
class ObservedLengths:
    """Lengths that were seen, each as likely as the next."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise WorkloadError if there is none, or one is impossible."""
        if not self.lengths or not all(0 < length <= MOST_TOKENS for length in self.lengths):
            raise WorkloadError(
                f"observed lengths must be a list of at least one length between 1 and {MOST_TOKENS} tokens"
            )

    @cached_property
    def _ordered(self) -> np.ndarray:
        return np.sort(np.array(self.lengths, float))

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        count = len(self._ordered)
        return self._ordered[np.minimum((shares * count).astype(np.int64), count - 1)]


@dataclass(frozen=True)
class LogNormalLengths:
    """Lengths of this mean whose logarithms are normal, with a deviation of `sigma`; at most `cap` tokens."""

    mean: float
    sigma: float = 0.0
    cap: float = math.inf

    def __post_init__(self) -> None:
        """Raise WorkloadError for impossible figures."""
        if not (0 < self.mean <= MOST_TOKENS and 0 <= self.sigma <= 10 and self.cap >= 1):
            raise WorkloadError(
                f"log-normal lengths need a mean between 0 and {MOST_TOKENS} tokens, a sigma between 0 and "
                f"10, and a cap of at least 1; they are {self.mean:g}, {self.sigma:g} and {self.cap:g}"
            )

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        scores = _scores_of(np.clip(shares, 1e-12, 1 - 1e-12))
        logs = math.log(self.mean) - self.sigma**2 / 2 + self.sigma * scores
        return np.minimum(np.exp(logs), self.cap)


@dataclass(frozen=True)
class RecordedLengths:
    """A recorded run's lengths, group by group: groups are drawn whole.

    `in_order`: group g has the lengths of the recorded group g; behind the last one comes the first again.
    """

    groups: tuple[tuple[int, ...], ...]
    in_order: bool = False

    def __post_init__(self) -> None:
        """Raise WorkloadError if there is no group, or one is empty or has an impossible length."""
        if not self.groups or not all(self.groups):
            raise WorkloadError("recorded lengths need at least one group, and each group a length")
        if not all(0 < length <= MOST_TOKENS for group in self.groups for length in group):
            raise WorkloadError(f"recorded lengths must lie between 1 and {MOST_TOKENS} tokens")

    @cached_property
    def _ordered(self) -> np.ndarray:
        return np.sort(np.concatenate([np.array(group, float) for group in self.groups]))

    def quantiles(self, shares: np.ndarray) -> np.ndarray:
        count = len(self._ordered)
        return self._ordered[np.minimum((shares * count).astype(np.int64), count - 1)]

    def draw_groups(self, count: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """Return the lengths of so many groups. Groups of another size than `size` are drawn from within.

        No group comes again before all others have come, so that the mean is the recorded one.
        """
        many = len(self.groups)
        if self.in_order:
            places = np.arange(count) % many
        else:
            places = np.concatenate([rng.permutation(many) for _ in range(-(-count // many))])[:count]
        found = np.empty((count, size))
        for row, place in enumerate(places.tolist()):
            group = self.groups[place]
            found[row] = group if len(group) == size else rng.choice(group, size)
        return found


@dataclass(frozen=True)
class DrawnLengths:
    """Lengths of all samples of a run, in tokens. A row for each group, in order of admission."""

    answers: np.ndarray  # int64 [groups, samples of a group]
    prompts: np.ndarray  # int64 [groups]
    predicted: np.ndarray  # float64 [groups]: the ranker's word for the answers of a group

    def answer(self, key: SampleKey) -> int:
        """Return the length of a sample's answer."""
        return int(self.answers[key])

    @property
    def attended(self) -> float:
        """The mean number of tokens that a sample attends to while it is drawn, over all steps."""
        answers = self.answers.astype(float)
        total = answers.sum()
        context = (answers * (self.prompts[:, None] + (answers - 1) / 2)).sum()
        return float(context / total)


@dataclass(frozen=True)
class Workload:
    """The lengths that a run meets.

    `between_groups`: the share (0 to 1) of the variance of lengths that lies between groups; the rest lies
    between the samples of a group. Groups of `RecordedLengths` are what they are.
    `ranker_sigma`: the standard deviation of the logarithm of a prediction's error; 0: each group's mean
    length is foretold exactly. Or else `ranker_correlation`: the rank correlation (-1 to 1) of predictions
    and groups' mean lengths.
    `growth`: by this factor answers grow from an iteration to the next.
    """

    answers: LengthSource | RecordedLengths
    prompts: LengthSource = LogNormalLengths(256)
    between_groups: float = 0.5
    ranker_sigma: float = 0.0
    ranker_correlation: float | None = None
    growth: float = 1.0

    def __post_init__(self) -> None:
        """Raise WorkloadError for impossible figures."""
        if not 0 <= self.between_groups <= 1:
            raise WorkloadError(
                f"between_groups is a share of the variance, 0 to 1; it is {self.between_groups:g}"
            )
        if not 0 <= self.ranker_sigma <= 10:
            raise WorkloadError(f"ranker_sigma must be between 0 and 10; it is {self.ranker_sigma:g}")
        if self.ranker_correlation is not None and not (
            -1 <= self.ranker_correlation <= 1 and not self.ranker_sigma
        ):
            raise WorkloadError(
                "ranker_correlation must be between -1 and 1, and ranker_sigma 0 with it: give one of both"
            )
        if not 0 < self.growth <= 10:
            raise WorkloadError(f"growth must be above 0 and at most 10; it is {self.growth:g}")

    def mean_answer(self, spec: RunSpec) -> float:
        """Return the mean length of an answer in the first iteration."""
        shares = (np.arange(_NODES) + 0.5) / _NODES
        return float(_tokens(self.answers.quantiles(shares), spec.sampling.max_tokens).mean())

    def mean_prompt(self, spec: RunSpec) -> float:
        """Return the mean length of a prompt."""
        shares = (np.arange(_NODES) + 0.5) / _NODES
        return float(_tokens(self.prompts.quantiles(shares), spec.sampling.max_prompt_tokens).mean())

    def draw(self, spec: RunSpec, seed: int, iterations: int | None = None) -> DrawnLengths:
        """Draw the lengths of a run's groups. `iterations`: of the run (default: as in the run file)."""
        algorithm = spec.algorithm
        rounds = algorithm.iterations if iterations is None else iterations
        count, size = rounds * algorithm.groups, algorithm.group_size
        of_answers, of_prompts, of_ranker = (np.random.default_rng([seed, part]) for part in range(3))
        if isinstance(self.answers, RecordedLengths):
            lengths = self.answers.draw_groups(count, size, of_answers)
        else:
            share = self.between_groups
            scores = math.sqrt(share) * of_answers.standard_normal((count, 1))
            scores = scores + math.sqrt(1 - share) * of_answers.standard_normal((count, size))
            lengths = self.answers.quantiles(_shares_of(scores))
        grown = self.growth ** (np.arange(count) // algorithm.groups).astype(float)
        answers = _tokens(lengths * grown[:, None], spec.sampling.max_tokens)
        prompts = _tokens(self.prompts.quantiles(of_prompts.random(count)), spec.sampling.max_prompt_tokens)
        return DrawnLengths(answers, prompts, self._predicted(answers.mean(axis=1), of_ranker))

    def _predicted(self, means: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal(len(means))
        if self.ranker_correlation is None:
            return means * np.exp(self.ranker_sigma * noise)
        # of two normal variables; by ranks it is as wanted then
        told = 2 * math.sin(math.pi * self.ranker_correlation / 6)
        ranks = np.empty(len(means))
        ranks[np.argsort(means, kind="stable")] = (np.arange(len(means)) + 0.5) / len(means)
        scores = told * _scores_of(ranks) + math.sqrt(max(0.0, 1 - told**2)) * noise
        predicted = np.empty(len(means))
        predicted[np.argsort(scores, kind="stable")] = np.sort(means)
        return predicted


def _tokens(lengths: np.ndarray, most: int) -> np.ndarray:
    return np.clip(np.rint(lengths), 1, most).astype(np.int64)


def _shares_of(scores: np.ndarray) -> np.ndarray:
    """Return the share of a normal distribution below each score."""
    return np.array(
        [0.5 * (1 + math.erf(score)) for score in (scores.ravel() / math.sqrt(2)).tolist()]
    ).reshape(scores.shape)


def _scores_of(shares: np.ndarray) -> np.ndarray:
    """Return the scores below which these shares of a normal distribution lie."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(share) for share in shares.ravel().tolist()]).reshape(shares.shape)
