"""The log-additive term: each token multiplies the answer's length by a factor of its own.

    log length = bias + sum over a prompt's tokens of weight x sqrt(how often it stands there)

Most tokens say nothing, and a few say much. So each weight has a spread of its own, which is learned too:
the weight is drawn towards 0 as strongly as its spread is small (a relevance prior, by mean-field expectation
maximisation). Ridge regression over bags of words has one spread for all weights, and needs several times as
many prompts where most words are filler.

The weights solve a linear system by conjugate gradients over the groups that are kept, starting from the
weights of the iteration before. A group that is kept no longer leaves behind how certain it made each weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_BITS = 15
WEIGHTS = 1 << _BITS  # tokens of any vocabulary, hashed
_SHARED = 0.3  # how much of a weight's spread is the mean spread of all
_CARRIED = 0.5  # of the certainty that a dropped group gave; its tokens' weights were not found independently
_FADE = 0.99  # of that certainty, from iteration to iteration: the policy drifts
_STEPS = 6  # of conjugate gradients, each time that spreads are learned
_AT_ONCE = 1 << 18  # entries of prompts in one pass, so that memory is bounded
_LEAST_NOISE = 1e-3  # squared log units


@dataclass(frozen=True)
class Bag:
    """A prompt's tokens without their order: hashed, each once, with the square root of its count."""

    places: np.ndarray  # uint16
    values: np.ndarray  # float32


def bags_of(prompts: Sequence[np.ndarray]) -> Bags:
    """Return the bags of prompts, given their tokens. No prompt may be empty."""
    tokens = np.concatenate([np.zeros(0, np.int32), *prompts])
    hashed = tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - _BITS)
    rows = np.repeat(np.arange(len(prompts), dtype=np.uint64), [len(prompt) for prompt in prompts])
    ordered = np.sort(rows << np.uint64(_BITS) | hashed)
    first = np.flatnonzero(np.concatenate([[True] * (len(ordered) > 0), ordered[1:] != ordered[:-1]]))
    counts = np.diff(np.append(first, len(ordered)))
    places, of_row = ordered[first] & np.uint64(WEIGHTS - 1), (ordered[first] >> np.uint64(_BITS)).astype(int)
    ends = np.concatenate([[0], np.cumsum(np.bincount(of_row, minlength=len(prompts)))])
    return Bags(places.astype(np.uint16), np.sqrt(counts).astype(np.float32), ends)


class Bags:
    """Many bags as one sparse matrix, a row for each."""

    def __init__(self, places: np.ndarray, values: np.ndarray, ends: np.ndarray) -> None:
        self._places, self._values, self._ends = places, values, ends  # row n: from ends[n] up to ends[n + 1]
        self.rows = len(ends) - 1
        self._cuts = self._cut()

    @classmethod
    def joined(cls, bags: Sequence[Bag]) -> Bags:
        """Return the matrix of these bags."""
        return cls(
            np.concatenate([np.zeros(0, np.uint16), *(bag.places for bag in bags)]),
            np.concatenate([np.zeros(0, np.float32), *(bag.values for bag in bags)]),
            np.cumsum([0, *(len(bag.places) for bag in bags)]),
        )

    def each(self) -> list[Bag]:
        """Return the bags one by one, as copies."""
        cuts = self._ends[1:-1]
        pairs = zip(np.split(self._places, cuts), np.split(self._values, cuts), strict=True)
        return [Bag(places.copy(), values.copy()) for places, values in pairs][: self.rows]

    def _cut(self) -> list[int]:
        cuts = [0]
        while cuts[-1] < self.rows:
            most = int(np.searchsorted(self._ends, self._ends[cuts[-1]] + _AT_ONCE, side="right")) - 1
            cuts.append(min(max(most, cuts[-1] + 1), self.rows))
        return cuts

    def times(self, weights: np.ndarray) -> np.ndarray:
        """Return for each bag the sum of its tokens' weights."""
        found = np.zeros(self.rows)
        for first, last in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            begin, end = self._ends[first], self._ends[last]
            parts = weights[self._places[begin:end]] * self._values[begin:end]
            found[first:last] = np.add.reduceat(parts, self._ends[first:last] - begin)
        return found

    def gathered(self, rows: np.ndarray, *, squared: bool = False) -> np.ndarray:
        """Return for each weight the sum over the bags that have its token of their numbers in `rows`."""
        found = np.zeros(WEIGHTS)
        for first, last in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            begin, end = self._ends[first], self._ends[last]
            values = self._values[begin:end]
            parts = np.repeat(rows[first:last], np.diff(self._ends[first : last + 1])) * values
            found += np.bincount(self._places[begin:end], parts * values if squared else parts, WEIGHTS)
        return found


_NAMES = ("weights", "spreads", "before", "certainty")


class Additive:
    """The weights, how far each may be from 0, and what dropped groups said of them. Immutable."""

    def __init__(
        self,
        weights: np.ndarray,
        spreads: np.ndarray,
        before: np.ndarray,
        certainty: np.ndarray,
        *,
        bias: float,
        noise: float,
    ) -> None:
        self._weights, self._spreads = weights, spreads
        self._before, self._certainty = before, certainty  # weights when groups were dropped; 1 / variance
        self._bias, self._noise = bias, noise  # noise: variance of a group's mean log; 0: nothing learned

    @classmethod
    def fresh(cls) -> Additive:
        """Return a term that knows nothing: it says 0 of every prompt."""
        return cls(*(np.zeros(WEIGHTS) for _ in _NAMES), bias=0.0, noise=0.0)

    def predict(self, bags: Bags) -> np.ndarray:
        """Return the log of each prompt's answer length, less a constant that the ranker adds."""
        return np.asarray(self._bias + bags.times(self._weights))

    def learned(self, bags: Bags, target: np.ndarray, weight: np.ndarray, *, rounds: int = 1) -> Additive:
        """Return the term after learning from all kept groups; `rounds`: how often spreads are learned.

        `target`: mean log lengths, less the constant.
        """
        before, certainty = self._before, self._certainty
        share = weight / weight.sum()
        squares = bags.gathered(weight, squared=True)
        seen = squares > 0
        weights, spreads, noise = self._weights, self._spreads, self._noise
        off = target - share @ target
        if noise == 0:
            noise = max(0.5 * float(share @ off**2), _LEAST_NOISE)
            mean = bags.gathered(weight) / weight.sum()
            spreads = np.full(WEIGHTS, noise / max(float(squares.sum() / weight.sum() - mean @ mean), 1e-9))
        for _ in range(rounds):
            weights = _solved(bags, off, weight, weights, (1 / spreads, before, certainty), noise)
            doubt = 1 / (1 / spreads + certainty + squares / noise)
            rest = off - _centred(bags.times(weights), share)
            found = float(weight @ rest**2 + squares @ np.where(seen, doubt, 0)) / len(target)
            noise = max(found, _LEAST_NOISE)
            size = weights**2 + doubt
            mean = float(size[seen].mean())
            spreads = np.where(seen | (certainty > 0), (size + _SHARED * mean) / (1 + _SHARED), mean)
        bias = float(share @ (target - bags.times(weights)))
        return Additive(weights, spreads, before, certainty, bias=bias, noise=noise)

    def without(self, dropped: Bags) -> Additive:
        """Return the term for an iteration in which these groups are kept no longer."""
        before, certainty = self._before, _FADE * self._certainty
        if dropped.rows and self._noise > 0:
            more = _CARRIED * dropped.gathered(np.ones(dropped.rows), squared=True) / self._noise
            certainty = certainty + more
            share = np.divide(more, certainty, out=np.zeros(WEIGHTS), where=certainty > 0)
            before = before + share * (self._weights - before)
        return Additive(self._weights, self._spreads, before, certainty, bias=self._bias, noise=self._noise)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the term as arrays, for a file."""
        values = (self._weights, self._spreads, self._before, self._certainty)
        return dict(zip(_NAMES, values, strict=True)) | {"numbers": np.array([self._bias, self._noise])}

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray]) -> Additive:
        """Restore a term. Raises KeyError or ValueError if an array is missing or does not fit."""
        for name in _NAMES:
            if arrays[name].shape != (WEIGHTS,) or arrays[name].dtype != np.float64:
                raise ValueError(
                    f"additive.{name} is {arrays[name].dtype} {arrays[name].shape}, not float64 ({WEIGHTS},)"
                )
        bias, noise = arrays["numbers"].tolist()
        return cls(*(arrays[name].copy() for name in _NAMES), bias=bias, noise=noise)


def _centred(values: np.ndarray, share: np.ndarray) -> np.ndarray:
    return np.asarray(values - share @ values)


def _solved(
    bags: Bags,
    target: np.ndarray,
    weight: np.ndarray,
    weights: np.ndarray,
    prior: tuple[np.ndarray, np.ndarray, np.ndarray],
    noise: float,
) -> np.ndarray:
    """Return better weights: some steps of conjugate gradients, with the diagonal as preconditioner."""
    pull, before, certainty = prior
    held, share = pull + certainty, weight / weight.sum()
    scale = weight / noise

    def product(values: np.ndarray) -> np.ndarray:
        return bags.gathered(scale * _centred(bags.times(values), share)) + held * values

    rest = bags.gathered(scale * target) + certainty * before - product(weights)
    diagonal = held + bags.gathered(scale, squared=True)
    ready = rest / diagonal
    step, size = ready, float(rest @ ready)
    for _ in range(_STEPS):
        if size <= 0:
            break
        image = product(step)
        if (bend := float(step @ image)) <= 0:  # what is left is too small for a float
            break
        along = size / bend
        weights, rest = weights + along * step, rest - along * image
        ready = rest / diagonal
        last, size = size, float(rest @ ready)
        step = ready + (size / last) * step
    return weights
