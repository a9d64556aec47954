"""What a prediction is worth: how long samples came to be that were predicted to be about so long.

The ranker's error is measured, not assumed. Pairs of (predicted, true) of the newest samples are kept; for a
new prediction the true ones of its neighbours are moved over to it:

    belief = predicted * {true_k / predicted_k : predicted_k near predicted}

So a ranker that is right has narrow beliefs, one that takes long for short has two humps, and where there are
no neighbours yet, a wide log-normal says that little is known.

How alike the errors of a group's samples are is measured too: `rho`, the correlation of their scores. A score
is where the true length lies in what was believed, as a point of the normal distribution.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT_PAIRS = 4096
QUANTILES = 64
_NEAR = 0.3  # in log units: a neighbour's weight falls with this width
_UNKNOWN = 0.5  # deviation of the log of a length of which nothing is known
_UNKNOWN_WEIGHT = 8.0  # so many neighbours count as much as the log-normal
_BINS = 48
_SURE = 2.0  # standard errors that the likeness of a group's samples must be above nothing

_SCORES = np.linspace(-4.0, 4.0, 1601)
_SHARES = np.array([0.5 * math.erfc(-score / math.sqrt(2)) for score in _SCORES])
LEVELS: np.ndarray = np.interp(
    (np.arange(QUANTILES) + 0.5) / QUANTILES, _SHARES, _SCORES
)  # scores of quantiles

Pair = tuple[float, float]  # predicted, true


@dataclass(frozen=True)
class Kin:
    """Scores of samples, of which those of a group are alike: mean + common part + own part."""

    group: np.ndarray
    mean: np.ndarray
    common: np.ndarray  # deviation of the part that a group has in common
    own: np.ndarray


class Beliefs:
    """Learns from pairs, and tells what they say of a new prediction."""

    _levels = (np.arange(QUANTILES) + 0.5) / QUANTILES

    def __init__(self, longest: int) -> None:
        self._longest = float(longest)
        self._pairs: deque[tuple[float, float, int]] = deque(maxlen=KEPT_PAIRS)  # of logs, and of which group
        self._seen = self._fitted = self._groups = 0
        self.rho = 0.0  # of one group's scores; 0: one tells nothing of another
        self._table: np.ndarray | None = None  # errors by bin and level, once somebody asks
        self._fit()

    def observe(self, groups: Sequence[Sequence[Pair]]) -> None:
        """(predicted, true) of samples that are finished, those of a group together."""
        for pairs in groups:
            self._groups += 1
            for predicted, true in pairs:
                self._pairs.append((math.log(max(predicted, 1.0)), math.log(max(true, 1.0)), self._groups))
            self._seen += len(pairs)

    def quantiles(self, predicted: np.ndarray) -> np.ndarray:
        """QUANTILES equally likely lengths for each prediction, ascending."""
        self._refit()
        if self._table is None:
            self._table = np.stack([np.interp(self._levels, row, self._errors) for row in self._shares])
        table = self._table
        place = np.interp(np.log(np.maximum(predicted, 1.0)), self._centers, np.arange(_BINS))
        low = np.minimum(place.astype(int), _BINS - 2)
        part = (place - low)[:, None]
        errors = (1 - part) * table[low] + part * table[low + 1]
        return self._clip(predicted[:, None] * np.exp(errors))

    def doubted(self, rows: np.ndarray, doubt: float) -> np.ndarray:
        """What is believed if such a share of all predictions is worth nothing: then any length may be."""
        if not (doubt and self._pairs):
            return rows
        any_length = np.exp(np.quantile([true for _, true, _ in self._pairs], self._levels))
        either = np.concatenate([rows, np.broadcast_to(any_length, rows.shape)], axis=1)
        weight = np.repeat([1 - doubt, doubt], QUANTILES) / QUANTILES
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
        doubt: float = 0.0,
    ) -> np.ndarray:
        """`count` draws of all lengths; each sample's own draws are spread evenly over what is likely."""
        self._refit()
        shares = _spread(count, len(predicted), rng)
        if kin is not None:
            groups, place = np.unique(kin.group, return_inverse=True)
            common = np.interp(_spread(count, len(groups), rng), _SHARES, _SCORES)[:, place]
            scores = kin.mean + kin.common * common + kin.own * np.interp(shares, _SHARES, _SCORES)
            shares = np.interp(scores, _SCORES, _SHARES)
        errors = np.empty((count, len(predicted)))
        for place in np.unique(places := self._bin(predicted)):
            mine = places == place
            errors[:, mine] = np.interp(shares[:, mine], self._shares[place], self._errors)
        lengths = self._clip(predicted[None, :] * np.exp(errors))
        if doubt and self._pairs:
            wrong = rng.random(lengths.shape) < doubt
            lengths[wrong] = np.exp(rng.choice([true for _, true, _ in self._pairs], int(wrong.sum())))
        return lengths

    @property
    def exact(self) -> bool:
        """Whether predictions never err."""
        self._refit()
        return self._flawless

    def _bin(self, predicted: np.ndarray) -> np.ndarray:
        return np.argmin(np.abs(np.log(np.maximum(predicted, 1.0))[:, None] - self._centers[None, :]), axis=1)

    def _clip(self, lengths: np.ndarray) -> np.ndarray:
        return np.clip(lengths, 1.0, self._longest)

    def _refit(self) -> None:
        if self._seen > self._fitted * 1.05:
            self._fit()

    def _fit(self) -> None:
        """For each bin of predictions: errors in order, and which share of the weight lies below each."""
        self._fitted = self._seen
        unknown = _UNKNOWN * np.array([-2.2, -1.5, -1.0, -0.7, -0.4, -0.13, 0.13, 0.4, 0.7, 1.0, 1.5, 2.2])
        known = np.array(self._pairs).reshape(-1, 3)
        low, high = (known[:, 0].min(), known[:, 0].max()) if len(known) else (0.0, np.log(self._longest))
        self._centers = np.linspace(low, max(high, low + 1e-3), _BINS)
        errors = known[:, 1] - known[:, 0]
        enough = len(known) >= KEPT_PAIRS // 16
        if not enough:
            errors = np.concatenate([errors, unknown])
        order = np.argsort(errors)
        near = np.exp(-0.5 * ((self._centers[:, None] - known[None, :, 0]) / _NEAR) ** 2) + 1e-6
        if not enough:
            extra = np.full((_BINS, len(unknown)), _UNKNOWN_WEIGHT / len(unknown))
            near = np.concatenate([near, extra], axis=1)
        near = near[:, order]
        below = np.cumsum(near, axis=1)
        self._shares = (below - 0.5 * near) / below[:, -1:]
        self._errors = errors[order]
        self._table = None
        self.rho = 0.0 if self._flawless else self._likeness(known)

    @property
    def _flawless(self) -> bool:
        return bool(len(self._pairs) >= KEPT_PAIRS // 16 and np.abs(self._errors).max() < 1e-6)

    def _likeness(self, known: np.ndarray) -> float:
        """Mean product of the scores of two samples of a group, by the mean square; 0 if it may be chance."""
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
    """Shares in [0, 1]: `count` for each sample, evenly spread, in any order."""
    parts = (np.arange(count)[:, None] + rng.random((count, samples))) / count
    return rng.permuted(parts, axis=0)
