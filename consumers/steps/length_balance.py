"""Whether order arrival trains all lengths alike: short groups come first, but only for a while.

    trained in iterations (t - W, t]        mean length   ┐
    admitted for iterations (t - W, t]      mean length   ┴ ratio: 1 where nothing is preferred

The ratio is known for t = the newest iteration - cap, since by then all groups admitted for t are trained.
"""

from __future__ import annotations

import math

import numpy as np

from schemas.admission import iteration_of
from schemas.algorithm import AlgorithmSection
from schemas.messages import StepRecord
from schemas.taken import trained_first


class LengthBalance:
    """Compares mean lengths over W = staleness + cap iterations. It holds those of twice as many."""

    def __init__(self, algorithm: AlgorithmSection, iteration: int) -> None:
        """`iteration`: the first one whose steps will be added."""
        self._algorithm, self._cap = algorithm, int(algorithm.most_stale)
        self._window = max(1, math.ceil(algorithm.staleness) + self._cap)
        # a group may be trained so many iterations before the one that it was admitted for
        self._first = iteration + (math.ceil(algorithm.staleness) if iteration else 0)
        self._trained: dict[int, tuple[int, int]] = {}  # by iteration: samples and tokens
        self._admitted: dict[int, tuple[int, int]] = {}

    def add(self, step: StepRecord) -> None:
        """Add a step that was trained."""
        first = trained_first(step, self._algorithm)
        groups, lengths = step.groups[first], step.lengths[first]
        _put(self._trained, step.iteration, lengths)
        admitted = np.array([iteration_of(group, self._algorithm.groups) for group in groups.tolist()])
        for iteration in np.unique(admitted).tolist():
            _put(self._admitted, iteration, lengths[admitted == iteration])
        oldest = step.iteration - self._cap - self._window
        for known in (self._trained, self._admitted):
            for iteration in [iteration for iteration in known if iteration < oldest]:
                del known[iteration]

    def ratio(self, iteration: int) -> float | None:
        """Return the ratio once an iteration is trained; None as long as not all lengths are known."""
        last = iteration - self._cap
        iterations = range(last - self._window + 1, last + 1)
        if iterations.start < self._first:
            return None
        means = []
        for known in (self._trained, self._admitted):
            found = [known.get(one, (0, 0)) for one in iterations]
            samples, tokens = sum(one for one, _ in found), sum(one for _, one in found)
            if not tokens:
                return None
            means.append(tokens / samples)
        return means[0] / means[1]


def _put(known: dict[int, tuple[int, int]], iteration: int, lengths: np.ndarray) -> None:
    samples, tokens = known.get(iteration, (0, 0))
    known[iteration] = samples + lengths.size, tokens + int(lengths.sum())
