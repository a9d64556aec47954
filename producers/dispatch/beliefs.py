"""Turns predictions into beliefs: by the lengths that samples with similar predictions came to have.

The ranker's error is measured, not assumed. Pairs of (predicted, true) of the newest samples are kept. For a
new prediction, the errors of the pairs with similar predictions are applied to it:

    belief = predicted * {true_k / predicted_k : predicted_k near predicted}

So a ranker that is right has narrow beliefs, and one that mistakes long answers for short ones has beliefs
with two humps. Where there are no similar predictions yet, the belief is a wide log-normal. An error that is
greater than all those is rare, but among thousands of samples some have it: the greatest errors are continued
as those of a normal distribution.

The likeness of the errors within a group is measured too: `rho` is the correlation of its samples' scores. A
score is the quantile of the true length in the belief, as a point of the standard normal distribution.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from producers.dispatch.drift import NO_DRIFT, Drift

KEPT_PAIRS = 4096
ENOUGH = 256  # pairs to believe anything by
QUANTILES = 64
_NEAR = 0.02  # in log units: least width at which the weight of a neighbouring pair falls
_UNKNOWN = 0.5  # deviation of the log of a length while there are few pairs
_UNKNOWN_WEIGHT = 8.0  # the log-normal weighs as much as so many neighbouring pairs
_BINS = 48
_FEWEST = 20.0  # pairs are taken to tell of a score that one of so many exceeds
_SURE = 2.0  # standard errors by which rho must exceed 0 to be believed

_SCORES = np.linspace(-4.0, 4.0, 1601)
_SHARES = np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in _SCORES])
_EVEN = (np.arange(QUANTILES) + 0.5) / QUANTILES
_FAR = 3.3  # the score of one more length, that one of 2,000 exceeds: where thousands run, some do
LEVELS: np.ndarray = np.append(np.interp(_EVEN, _SHARES, _SCORES), _FAR)  # scores of a belief's lengths

_FURTHEST, _FINE = 4.0, 0.02  # in log units
_ERRORS = np.arange(-_FURTHEST, _FURTHEST + _FINE, _FINE)

Pair = tuple[float, float]  # predicted, true


@dataclass(frozen=True)
class Kin:
    """A model of samples' scores: mean + a common part, shared by a group + an own part."""

    group: np.ndarray
    mean: np.ndarray
    common: np.ndarray  # deviation of the common part
    own: np.ndarray


class Beliefs:
    """Learns from pairs of (predicted, true) lengths, and gives the belief of a new prediction."""

    _levels = np.interp(LEVELS, _SCORES, _SHARES)  # as shares

    def __init__(self, longest: int) -> None:
        self._longest = float(longest)
        self._pairs: deque[tuple[float, float, int]] = deque(maxlen=KEPT_PAIRS)  # logs of both, and the group
        self._seen = self._fitted = self._groups = 0
        self._longest_seen = 0.0
        self.rho = 0.0  # correlation of the scores in a group; 0: a sample says nothing of the others
        self._table: np.ndarray | None = None  # errors by bin and level; computed when it is needed
        self._fit()

    def observe(self, groups: Sequence[Sequence[Pair]]) -> None:
        """Learn (predicted, true) lengths of finished samples, given by group."""
        for pairs in groups:
            self._groups += 1
            for predicted, true in pairs:
                self._longest_seen = max(self._longest_seen, true)
                self._pairs.append((math.log(max(predicted, 1.0)), math.log(max(true, 1.0)), self._groups))
            self._seen += len(pairs)

    def frozen(self) -> Beliefs:
        """Return a copy that stays as it is, for another thread."""
        self._refit()
        other = copy.copy(self)
        other._pairs = self._pairs.copy()
        return other

    @property
    def are_known(self) -> bool:
        """Whether there are pairs enough to believe anything."""
        return len(self._pairs) >= ENOUGH

    def quantiles(self, predicted: np.ndarray) -> np.ndarray:
        """Return each prediction's belief: QUANTILES equally likely lengths, ascending, and a far one."""
        self._refit()
        if self._table is None:
            self._table = np.stack([self._error_at(self._levels, place) for place in range(_BINS)])
        table = self._table
        place = np.interp(np.log(np.maximum(predicted, 1.0)), self._centers, np.arange(_BINS))
        low = np.minimum(place.astype(int), _BINS - 2)
        part = (place - low)[:, None]
        errors = (1 - part) * table[low] + part * table[low + 1]
        return self._clip(predicted[:, None] * np.exp(errors))

    def drifted(self, predicted: np.ndarray, drift: Drift) -> np.ndarray:
        """Return `quantiles` under a drift."""
        predicted, shift = self._meant(predicted, drift)
        wild, rows = drift.wild, self._clip(self.quantiles(predicted) * math.exp(shift))
        if not (wild and self._any_length.size):
            return rows
        any_length = np.exp(np.quantile(self._any_length, self._levels))
        either = np.concatenate([rows, np.broadcast_to(any_length, rows.shape)], axis=1)
        each = np.append(np.full(QUANTILES, 1 / QUANTILES), 0.0)
        weight = np.outer([1 - wild, wild], each).ravel()
        order = np.argsort(either, axis=1)
        below = np.cumsum(weight[order], axis=1) - 0.5 * weight[order]
        either = np.take_along_axis(either, order, axis=1)
        return np.stack([np.interp(self._levels, b, e) for b, e in zip(below, either, strict=True)])

    def draws(
        self,
        predicted: np.ndarray,
        count: int,
        rng: np.random.Generator,
        kin: Kin | None = None,
        drift: Drift = NO_DRIFT,
    ) -> np.ndarray:
        """Draw `count` lengths for each prediction, evenly spread over its belief.

        `kin` makes groups alike.
        """
        self._refit()
        predicted, shift = self._meant(predicted, drift)
        shares = _spread(count, len(predicted), rng)
        if kin is not None:
            groups, place = np.unique(kin.group, return_inverse=True)
            common = np.interp(_spread(count, len(groups), rng), _SHARES, _SCORES)[:, place]
            scores = kin.mean + kin.common * common + kin.own * np.interp(shares, _SHARES, _SCORES)
            shares = np.interp(scores, _SCORES, _SHARES)
        errors = self._errors_at(shares, self._bin(predicted))
        common = shift + drift.error * np.interp(_spread(count, 1, rng), _SHARES, _SCORES)
        lengths = self._clip(predicted[None, :] * np.exp(errors + common))
        if drift.wild and self._pairs:
            wrong = rng.random(lengths.shape) < drift.wild
            lengths[wrong] = np.exp(rng.choice([true for _, true, _ in self._pairs], int(wrong.sum())))
        return lengths

    def outlasting(
        self,
        predicted: np.ndarray,
        tokens: np.ndarray,
        rng: np.random.Generator,
        scores: tuple[np.ndarray, np.ndarray],
        drift: Drift = NO_DRIFT,
    ) -> np.ndarray:
        """Draw a length for each sample that has `tokens` already: a greater one, if any was ever seen.

        `scores`: mean and deviation of each sample's score; 0 and 1 if only its prediction is known.
        """
        self._refit()
        predicted, shift = self._meant(predicted, drift)
        mean, deviation = scores
        errors = np.log(np.maximum(tokens, 1.0)) - np.log(np.maximum(predicted, 1.0)) - shift
        below, places = np.empty(len(predicted)), self._bin(predicted)
        for place in np.unique(places):
            mine = places == place
            below[mine] = self._share_at(errors[mine], place)
        floors = np.interp((np.interp(below, _SHARES, _SCORES) - mean) / deviation, _SCORES, _SHARES)
        shares = floors + (1 - floors) * rng.random(len(predicted))
        shares = np.interp(mean + deviation * np.interp(shares, _SHARES, _SCORES), _SCORES, _SHARES)
        lengths = predicted * np.exp(self._errors_at(shares, places) + shift)
        if drift.wild and self._any_length.size:
            upto = np.searchsorted(self._any_length, np.log(np.maximum(tokens, 1.0)), side="right")
            longer = len(self._any_length) - upto
            weight = drift.wild * longer / len(self._any_length)
            own = (1 - drift.wild) * (1 - floors)
            wrong = rng.random(len(predicted)) * (weight + own) < weight
            chosen = upto[wrong] + (rng.random(int(wrong.sum())) * longer[wrong]).astype(int)
            lengths[wrong] = np.exp(self._any_length[chosen])
        return self._clip(lengths)

    def _errors_at(self, shares: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the errors below which these shares lie. `places`: the bin of each column."""
        errors = np.empty(shares.shape)
        for place in np.unique(places):
            mine = places == place
            errors[..., mine] = self._error_at(shares[..., mine], place)
        return errors

    def _error_at(self, shares: np.ndarray, place: int) -> np.ndarray:
        """Return the errors of one bin below which these shares lie."""
        seen = np.interp(shares, self._shares[place], self._errors)
        from_score, error, slope = self._tails[place]
        scores = np.interp(shares, _SHARES, _SCORES)
        return np.where(scores > from_score, np.maximum(seen, error + slope * (scores - from_score)), seen)

    def _share_at(self, errors: np.ndarray, place: int) -> np.ndarray:
        """Return the shares of one bin that lie below these errors."""
        seen = np.interp(errors, self._errors, self._shares[place], 0.0, 1.0)
        from_score, error, slope = self._tails[place]
        beyond = np.interp(from_score + (errors - error) / max(slope, 1e-9), _SCORES, _SHARES)
        return np.where(errors > error, np.minimum(seen, beyond), seen)

    @staticmethod
    def _meant(predicted: np.ndarray, drift: Drift) -> tuple[np.ndarray, float]:
        """Return the predictions as they should be, and what is added to the log of lengths then."""
        if drift.of_predictions:
            return predicted * math.exp(drift.shift), 0.0
        return predicted, drift.shift

    def likelihood(
        self,
        predicted: np.ndarray,
        tokens: np.ndarray,
        done: np.ndarray,
        shifts: np.ndarray,
        *,
        of_predictions: bool,
    ) -> np.ndarray:
        """Return, for each sample and each shift, how likely what is seen of it is.

        `done`: samples whose length is `tokens`; that of the others is greater. `of_predictions`: whether the
        logs of all predictions are too small by the shift, or the logs of all lengths are greater by it.
        """
        from producers.dispatch.drift_sums import likelihoods  # compiled: only who plans needs it

        self._refit()
        said, logs = (np.log(np.maximum(some, 1.0)) for some in (predicted, tokens))
        ends = float(self._centers[0]), float(self._centers[-1])
        return likelihoods(self._below, ends, _FINE, said, logs, done, shifts, of_predictions)

    def likelihood_of_any(self, tokens: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Return the same for samples whose prediction says nothing: theirs may be the length of any pair."""
        self._refit()
        logs, found = np.log(np.maximum(tokens, 1.0)), np.empty(len(tokens))
        count = max(len(self._any_length), 1)
        found[~done] = (count - np.searchsorted(self._any_length, logs[~done])) / count
        below, above = (np.searchsorted(self._any_length, logs[done] + by) for by in (-0.1, 0.1))
        found[done] = (above - below) / (0.2 * count)
        return found

    @property
    def exact(self) -> bool:
        """Whether the predictions of all kept pairs were exact."""
        self._refit()
        return self._flawless

    def _bin(self, predicted: np.ndarray) -> np.ndarray:
        return self._bin_of_log(np.log(np.maximum(predicted, 1.0)))

    def _bin_of_log(self, said: np.ndarray) -> np.ndarray:
        low, high = self._centers[0], self._centers[-1]
        return np.clip(np.rint((said - low) / (high - low) * (_BINS - 1)), 0, _BINS - 1).astype(int)

    def _clip(self, lengths: np.ndarray) -> np.ndarray:
        seen = self._longest_seen if self._pairs else self._longest
        return np.clip(lengths, 1.0, min(self._longest, max(seen, 1.0)))

    def _refit(self) -> None:
        if self._seen > self._fitted * 1.05:
            self._fit()

    def _fit(self) -> None:
        """Compute the errors in ascending order and, for each bin of predictions, the weight below each."""
        self._fitted = self._seen
        unknown = _UNKNOWN * np.array([-2.2, -1.5, -1.0, -0.7, -0.4, -0.13, 0.13, 0.4, 0.7, 1.0, 1.5, 2.2])
        known = np.array(self._pairs).reshape(-1, 3)
        low, high = (known[:, 0].min(), known[:, 0].max()) if len(known) else (0.0, np.log(self._longest))
        self._centers = np.linspace(low, max(high, low + 1e-3), _BINS)
        errors = known[:, 1] - known[:, 0]
        enough = len(known) >= ENOUGH
        if not enough:
            errors = np.concatenate([errors, unknown])
        order = np.argsort(errors)
        width = max(_NEAR, 1.06 * float(known[:, 0].std()) * len(known) ** -0.2) if len(known) else 1.0
        near = np.exp(-0.5 * ((self._centers[:, None] - known[None, :, 0]) / width) ** 2) + 1e-6
        if not enough:
            extra = np.full((_BINS, len(unknown)), _UNKNOWN_WEIGHT / len(unknown))
            near = np.concatenate([near, extra], axis=1)
        near = near[:, order]
        below = np.cumsum(near, axis=1)
        self._shares = (below - 0.5 * near) / below[:, -1:]
        self._errors = errors[order]
        self._table = None
        self._below = np.stack([np.interp(_ERRORS, self._errors, row, 0.0, 1.0) for row in self._shares])
        self._any_length = np.sort(known[:, 1])
        self.rho = 0.0 if self._flawless else self._likeness(known)
        self._tails = self._beyond_seen(near, known)

    def _beyond_seen(self, near: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return for each bin the score from which pairs are too few to tell, the error there and the slope.

        From there the error grows with the score at least as it does from the middle to there. `near`: the
        weights of all pairs in each bin. Pairs of a group count less, since they tell the same.
        """
        size = len(known) / max(len(np.unique(known[:, 2])), 1)
        count = near.sum(axis=1) ** 2 / (near**2).sum(axis=1) / (1 + max(size - 1, 0.0) * self.rho)
        scores = np.interp(1 - 1 / np.maximum(count, _FEWEST), _SHARES, _SCORES)
        tails = np.empty((len(near), 3))
        for place, score in enumerate(scores):
            shares = (0.5, float(np.interp(score, _SCORES, _SHARES)))
            middle, far = np.interp(shares, self._shares[place], self._errors)
            tails[place] = score, far, (far - middle) / score
        return tails

    @property
    def _flawless(self) -> bool:
        return bool(len(self._pairs) >= ENOUGH and np.abs(self._errors).max() < 1e-6)

    def _likeness(self, known: np.ndarray) -> float:
        """Estimate rho: the mean product of two scores of a group, over the mean square.

        0 if that may be chance.
        """
        _, place, size = np.unique(known[:, 2], return_inverse=True, return_counts=True)
        pairs = float((size * (size - 1)).sum())
        if not pairs:
            return 0.0
        bins = self._bin(np.exp(known[:, 0]))
        scores = np.empty(len(known))
        for number in np.unique(bins):
            mine = bins == number
            shares = np.interp((known[:, 1] - known[:, 0])[mine], self._errors, self._shares[number])
            scores[mine] = np.interp(shares, _SHARES, _SCORES)
        square = float((scores**2).mean())
        sums, squares = np.bincount(place, scores), np.bincount(place, scores**2)
        rho = float((sums**2 - squares).sum()) / pairs / square
        return min(rho, 0.99) if rho > _SURE * math.sqrt(2 / pairs) else 0.0


def _spread(count: int, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Return, for each sample, `count` evenly spread shares in [0, 1], in random order."""
    parts = (np.arange(count)[:, None] + rng.random((count, samples))) / count
    return rng.permuted(parts, axis=0)
