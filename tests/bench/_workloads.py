"""What dispatch is measured on: lengths, what a ranker says of them, and how fast the generators are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from producers.dispatch.beliefs import KEPT_PAIRS, Pair
from producers.ranker.ranker import Question
from tests.bench._lengths import CURVE, paper_lengths

SAMPLES, SIGMA = 1024, 0.25  # deviation of the log of the ranker's error
ALIKE = 0.65  # share of the error's variance that the samples of a group have in common
LONGEST = 20_000
BUDGET = 32_768  # sampling.max_tokens: as in a run, well above the lengths that come


@dataclass(frozen=True)
class ToldLengths:
    """Says of each problem what it is told to say."""

    lengths: Mapping[int, float]
    name: str = "bench"

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        return np.array([self.lengths[question.key] for question in questions])


Lengths = Callable[[int, np.random.Generator], np.ndarray]
Ranker = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # what it says of lengths


@dataclass(frozen=True)
class Workload:
    """Samples: one row each."""

    true: np.ndarray
    predicted: np.ndarray
    group: np.ndarray

    def pairs(self, *, exact: bool) -> list[list[Pair]]:
        """As the beliefs learn of them, group by group."""
        groups: dict[int, list[Pair]] = {}
        predicted = self.true if exact else self.predicted
        for number, one, true in zip(
            self.group.tolist(), predicted.tolist(), self.true.tolist(), strict=True
        ):
            groups.setdefault(number, []).append((one, true))
        return list(groups.values())


def _paper(longest: int) -> Lengths:
    return lambda count, rng: paper_lengths(count, longest, rng)


def _bimodal(count: int, rng: np.random.Generator) -> np.ndarray:
    """Seven of ten are short answers, the others long chains of thought."""
    long = rng.random(count) < 0.3
    return _whole(np.where(long, rng.normal(14_000, 1_500, count), rng.normal(2_000, 400, count)))


def _pareto(count: int, rng: np.random.Generator) -> np.ndarray:
    """A power law of exponent 1.5: most are short, few are very long."""
    return _whole(600 * (1 + rng.pareto(1.5, count)))


def _math(count: int, rng: np.random.Generator) -> np.ndarray:
    """A log-normal body, and one of thirty that thinks until it is cut off."""
    body = rng.lognormal(np.log(2_500), 0.75, count)
    return _whole(np.where(rng.random(count) < 1 / 30, LONGEST, body))


def _near_uniform(count: int, rng: np.random.Generator) -> np.ndarray:
    """All about as long."""
    return _whole(rng.normal(5_000, 500, count))


def _whole(lengths: np.ndarray) -> np.ndarray:
    return np.clip(lengths, 1, LONGEST).astype(int)


LENGTHS: Mapping[str, Lengths] = {
    "paper": _paper(LONGEST), "bimodal": _bimodal, "Pareto 1.5": _pareto, "math": _math,
    "near-uniform": _near_uniform, "paper 10K": _paper(LONGEST // 2), "paper 5K": _paper(LONGEST // 4),
}  # fmt: skip


def _symmetric(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return lengths * np.exp(rng.normal(0, SIGMA, len(lengths)))


def _regressed(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """As a trained ranker says it: what is to be expected of a length that was seen through noise."""
    seen = np.log(_symmetric(lengths, rng))
    trust = max(0.0, 1 - SIGMA**2 / seen.var())
    return np.exp(seen.mean() + trust * (seen - seen.mean()))


def _partly(share: float, wrong: Ranker) -> Ranker:
    def says(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        taken = np.where(rng.random(len(lengths)) < share, wrong(lengths, rng), lengths)
        return _symmetric(taken, rng)

    return says


def _shifted(factor: float) -> Ranker:
    return lambda lengths, rng: _symmetric(lengths * factor, rng)


def _inverted(lengths: np.ndarray, _: np.random.Generator) -> np.ndarray:
    """The longest is taken for the shortest."""
    place = np.argsort(np.argsort(lengths))
    return np.sort(lengths)[::-1][place]


def _shuffled(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(lengths)


@dataclass(frozen=True)
class Errors:
    """What a ranker says now, and what it said of the samples before (None: there were none)."""

    now: Ranker
    before: Ranker | None


ERRORS: Mapping[str, Errors] = {
    "regressed": Errors(_regressed, _regressed),
    "symmetric": Errors(_symmetric, _symmetric),
    "10 % wild, unseen": Errors(_partly(0.1, _shuffled), _symmetric),
    "twice too short, unseen": Errors(_shifted(0.5), _symmetric),
    "1.3 too short, unseen": Errors(_shifted(1 / 1.3), _symmetric),
    "1.3 too long, unseen": Errors(_shifted(1.3), _symmetric),
    "a fifth inverted": Errors(_partly(0.2, _inverted), _partly(0.2, _inverted)),
    "a fifth inverted, unseen": Errors(_partly(0.2, _inverted), _symmetric),
    "cold": Errors(_symmetric, None),
}


@dataclass(frozen=True)
class Case:
    """Lengths, a ranker's errors, and how fast the generators are."""

    lengths: str
    errors: str
    size: int = 1  # of a group; in groups, errors are symmetric
    slow: float = 1.0  # every other generator is so much slower
    drawn: Lengths | None = None  # instead of LENGTHS[lengths]

    @property
    def name(self) -> str:
        """The case in words, without its lengths."""
        parts = [self.errors]
        if self.size > 1:
            parts.append(f"groups of {self.size}")
        if self.slow > 1:
            parts.append(f"every other {self.slow:g} times as slow")
        return ", ".join(parts)

    def draw(self, rng: np.random.Generator, samples: int = SAMPLES) -> tuple[Workload, Workload | None]:
        """The samples to be made, and those that were made before."""
        errors = ERRORS[self.errors]
        before = self._draw(KEPT_PAIRS, errors.before, rng) if errors.before else None
        return self._draw(samples, errors.now, rng), before

    def tables(self, generators: int, slots: int) -> list[np.ndarray]:
        """Seconds of a step of each generator."""
        fast, slow = CURVE.table(slots), CURVE.scaled(self.slow).table(slots)
        return [slow if number % 2 else fast for number in range(generators)]

    def _draw(self, count: int, says: Ranker, rng: np.random.Generator) -> Workload:
        drawn = self.drawn or LENGTHS[self.lengths]
        typical = drawn(count // self.size, rng)
        group = np.repeat(np.arange(len(typical)), self.size)
        if self.size == 1:
            return Workload(typical, says(typical, rng), group)
        true = _whole(typical[group] * np.exp(rng.normal(0, SIGMA * np.sqrt(1 - ALIKE), count)))
        seen = typical * np.exp(rng.normal(0, SIGMA * np.sqrt(ALIKE), len(typical)))
        return Workload(true, seen[group], group)
