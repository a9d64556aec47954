"""What a prediction is worth: how long samples came to be that were predicted to be about so long.

The ranker's error is measured, not assumed. Pairs of (predicted, true) of the newest samples are kept; for a
new prediction the true ones of its neighbours are moved over to it:

    belief = predicted * {true_k / predicted_k : predicted_k near predicted}

So a ranker that is right has narrow beliefs, one that takes long for short has two humps, and where there are
no neighbours yet, a wide log-normal says that little is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

KEPT = 4096
QUANTILES = 64
_NEAR = 0.3  # in log units: a neighbour's weight falls with this width
_UNKNOWN = 0.5  # deviation of the log of a length of which nothing is known
_UNKNOWN_WEIGHT = 8.0  # so many neighbours count as much as the log-normal
_BINS = 48


class Beliefs:
    """Learns from pairs, and tells what they say of a new prediction."""

    def __init__(self, longest: int) -> None:
        self._longest = float(longest)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._seen = self._fitted = 0
        self._fit()

    def observe(self, pairs: Iterable[tuple[float, float]]) -> None:
        """(predicted, true) of samples that are finished."""
        for predicted, true in pairs:
            self._pairs.append((np.log(max(predicted, 1.0)), np.log(max(true, 1.0))))
            self._seen += 1

    def quantiles(self, predicted: np.ndarray) -> np.ndarray:
        """QUANTILES equally likely lengths for each prediction, ascending."""
        self._refit()
        shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
        table = np.stack([np.interp(shares, row, self._errors) for row in self._shares])
        place = np.interp(np.log(np.maximum(predicted, 1.0)), self._centers, np.arange(_BINS))
        low = np.minimum(place.astype(int), _BINS - 2)
        part = (place - low)[:, None]
        errors = (1 - part) * table[low] + part * table[low + 1]
        return self._clip(predicted[:, None] * np.exp(errors))

    def draws(self, predicted: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` draws of all lengths; each sample's own draws are spread evenly over what is likely."""
        self._refit()
        parts = (np.arange(count)[:, None] + rng.random((count, len(predicted)))) / count
        shares = rng.permuted(parts, axis=0)
        errors = np.empty((count, len(predicted)))
        for place in np.unique(places := self._bin(predicted)):
            mine = places == place
            errors[:, mine] = np.interp(shares[:, mine], self._shares[place], self._errors)
        return self._clip(predicted[None, :] * np.exp(errors))

    @property
    def exact(self) -> bool:
        """Whether predictions never err."""
        self._refit()
        return bool(len(self._pairs) >= KEPT // 16 and np.abs(self._errors).max() < 1e-6)

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
        known = np.array(self._pairs).reshape(-1, 2)
        low, high = (known[:, 0].min(), known[:, 0].max()) if len(known) else (0.0, np.log(self._longest))
        self._centers = np.linspace(low, max(high, low + 1e-3), _BINS)
        errors = known[:, 1] - known[:, 0]
        enough = len(known) >= KEPT // 16
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
