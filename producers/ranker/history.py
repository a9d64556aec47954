"""Corrects the network's prediction by the lengths of a prompt's answers in earlier epochs.

    correction = a (newest - read) + b (all faded - read) + c

`read` is the network's prediction, as the log of a length. `newest` is the mean log length in the latest
epoch, and `all faded` a mean over all epochs in which old ones fade. The weights a and b and the drift c are
fitted by least squares over prompts that came again; recent iterations count more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from producers.ranker.fit_sums import fit_sums

_NEWEST = 0.4  # weight of the newest length in the faded mean
_FADE = 0.97  # of the fit's sums, from iteration to iteration
_DOUBT = 1.0  # regularisation: squared log units, so that few observations are not believed


class History:
    """Mean log lengths by problem, and their weights. Immutable: `seen` returns the next one."""

    def __init__(
        self,
        lengths: Mapping[int, tuple[float, float]] | None = None,
        square: np.ndarray | None = None,
        product: np.ndarray | None = None,
    ) -> None:
        self._lengths = dict(lengths or {})  # newest and faded mean log length
        self._square = np.zeros((3, 3)) if square is None else square
        self._product = np.zeros(3) if product is None else product

    @property
    def worth(self) -> np.ndarray:
        """The weights of the newest and the faded length, and the drift."""
        doubt = np.diag([_DOUBT, _DOUBT, _DOUBT])
        return np.linalg.solve(self._square + doubt, self._product)

    def correction(self, keys: Sequence[int], read: np.ndarray) -> np.ndarray:
        """Return corrections to add to the predicted logs in `read`; 0 for new prompts."""
        return np.asarray(self._features(keys, read) @ self.worth)

    def seen(self, keys: Sequence[int], read: np.ndarray, found: np.ndarray) -> History:
        """Return the history after an iteration.

        `read`: predicted logs; `found`: mean log lengths of its groups.
        """
        told = self._features(keys, read)
        lengths = dict(self._lengths)
        for key, value in zip(keys, found.tolist(), strict=True):
            faded = _NEWEST * value + (1 - _NEWEST) * lengths[key][1] if key in lengths else value
            lengths[key] = value, faded
        return History(
            lengths, _FADE * self._square + told.T @ told, _FADE * self._product + told.T @ (found - read)
        )

    def _features(self, keys: Sequence[int], read: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(keys), 3))
        for row, (key, said) in enumerate(zip(keys, read.tolist(), strict=True)):
            if key in self._lengths:
                newest, faded = self._lengths[key]
                rows[row] = newest - said, faded - said, 1.0
        return rows

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the history as arrays, for a file."""
        return {
            "keys": np.array(list(self._lengths), np.uint64),
            "lengths": np.array(list(self._lengths.values()), np.float64).reshape(-1, 2),
            "square": self._square,
            "product": self._product,
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray]) -> History:
        """Restore a history. Raises KeyError or ValueError if an array is missing or does not fit."""
        pairs = (tuple(pair) for pair in arrays["lengths"].tolist())
        lengths = dict(zip(arrays["keys"].tolist(), pairs, strict=True))
        return cls(lengths, *fit_sums(arrays, "history"))
