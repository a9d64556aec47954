"""What dispatch is measured on: lengths, what a ranker says of them, and how fast the generators are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from producers.dispatch.beliefs import KEPT_PAIRS, Pair
from tests.bench._lengths import CURVE, paper_lengths

SAMPLES, SIGMA = 1024, 0.25  # deviation of the log of the ranker's error
ALIKE = 0.65  # share of the error's variance that the samples of a group have in common
INDEPENDENT = "independent"
LONGEST = 20_000

Draw = Callable[[int, np.random.Generator], np.ndarray]


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


Error = Callable[[np.ndarray, np.random.Generator], np.ndarray]  # what a ranker says of lengths


def _noisy(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return lengths * np.exp(rng.normal(0, SIGMA, len(lengths)))


@dataclass(frozen=True)
class Case:
    """How samples come out, and who makes them. The ranker's errors of before are those of `before`."""

    name: str
    lengths: str
    drawn: Draw
    says: Error = _noisy
    before: Error | None = None  # None: as now
    size: int = 1  # of a group
    slow: float = 1.0  # every other generator is so much slower
    shapes: tuple[tuple[int, int], ...] = ()  # in a quick run

    @property
    def grouped(self) -> bool:
        """Whether samples tell of one another."""
        return self.size > 1

    def draw(self, rng: np.random.Generator) -> tuple[Workload, Workload]:
        """The samples to be made, and those that were made before."""
        return self._draw(SAMPLES, self.says, rng), self._draw(KEPT_PAIRS, self.before or self.says, rng)

    def tables(self, generators: int, slots: int) -> list[np.ndarray]:
        """Seconds of a step of each generator."""
        fast, slow = CURVE.table(slots), CURVE.scaled(self.slow).table(slots)
        return [slow if number % 2 else fast for number in range(generators)]

    def _draw(self, count: int, says: Error, rng: np.random.Generator) -> Workload:
        if self.size == 1:
            true = self.drawn(count, rng)
            return Workload(true, says(true, rng), np.arange(count))
        typical = self.drawn(count // self.size, rng)
        predicted = typical * np.exp(rng.normal(0, SIGMA * np.sqrt(ALIKE), len(typical)))
        group = np.repeat(np.arange(len(typical)), self.size)
        true = typical[group] * np.exp(rng.normal(0, SIGMA * np.sqrt(1 - ALIKE), count))
        return Workload(np.clip(true, 1, LONGEST).astype(int), predicted[group], group)


def paper(longest: int) -> Case:
    """The paper's histogram, scaled."""
    return Case(INDEPENDENT, f"{longest // 1000}K", lambda count, rng: paper_lengths(count, longest, rng))


def own(name: str, lengths: np.ndarray) -> Case:
    """Lengths of one's own."""
    return Case(INDEPENDENT, name, lambda count, rng: rng.choice(lengths, count))


def _paper(count: int, rng: np.random.Generator) -> np.ndarray:
    return paper_lengths(count, LONGEST, rng)


def _heavy(count: int, rng: np.random.Generator) -> np.ndarray:
    """A power law: most are short, few are very long."""
    return np.clip(600 * (1 + rng.pareto(1.1, count)), 1, LONGEST).astype(int)


def _light(count: int, rng: np.random.Generator) -> np.ndarray:
    """All about as long."""
    return np.clip(rng.normal(5000, 800, count), 1, LONGEST).astype(int)


def _partly(share: float, wrong: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Error:
    def says(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        taken = np.where(rng.random(len(lengths)) < share, wrong(lengths, rng), lengths)
        return _noisy(taken, rng)

    return says


def _inverted(lengths: np.ndarray, _: np.random.Generator) -> np.ndarray:
    """The longest is taken for the shortest."""
    place = np.argsort(np.argsort(lengths))
    return np.sort(lengths)[::-1][place]


def _shuffled(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(lengths)


_AMPLE = ((8, 256),)
_TWO = ((8, 32), (8, 256))
CASES = (
    Case("groups of 8", "20K", _paper, size=8, shapes=((4, 64), (4, 256), (8, 64), (8, 256))),
    Case("groups of 16", "20K", _paper, size=16, shapes=((4, 256), (8, 64))),
    Case("a fifth shuffled", "20K", _paper, _partly(0.2, _shuffled), shapes=_AMPLE),
    Case("a fifth inverted", "20K", _paper, _partly(0.2, _inverted), shapes=_AMPLE),
    Case("a fifth inverted, unseen before", "20K", _paper, _partly(0.2, _inverted), _noisy, shapes=_AMPLE),
    Case("heavy tail", "power law", _heavy, shapes=_AMPLE),
    Case("light tail", "normal", _light, shapes=_AMPLE),
    Case("every other half as fast", "20K", _paper, slow=2.0, shapes=_TWO),
)
