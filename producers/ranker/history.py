"""What a prompt's own answers of earlier epochs tell of its next ones, beyond what is read in it.

    correction = a (newest - read) + b (all faded - read) + c

Of earlier mean log lengths there are two: the newest, and all of them with old ones fading. How much each is
worth, and how much everything has drifted since, is measured: by least squares over what came of prompts that
came again, recent ones counting more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_NEWEST = 0.4  # weight of the newest in the faded mean
_FADE = 0.97  # of what was measured, from window to window
_DOUBT = 1.0  # squared log units that must have been seen before anything is believed


class History:
    """Mean log lengths by problem, and what they are worth. It never changes: `seen` gives the next one."""

    def __init__(
        self,
        lengths: Mapping[int, tuple[float, float]] | None = None,
        square: np.ndarray | None = None,
        product: np.ndarray | None = None,
    ) -> None:
        self._lengths = dict(lengths or {})  # newest and faded
        self._square = np.zeros((3, 3)) if square is None else square
        self._product = np.zeros(3) if product is None else product

    @property
    def worth(self) -> np.ndarray:
        """Weights of newest and faded, and the drift."""
        doubt = np.diag([_DOUBT, _DOUBT, _DOUBT])
        return np.linalg.solve(self._square + doubt, self._product)

    def correction(self, keys: Sequence[int], read: np.ndarray) -> np.ndarray:
        """What to add to the logs that were read in the prompts; 0 for prompts that are new."""
        return np.asarray(self._features(keys, read) @ self.worth)

    def seen(self, keys: Sequence[int], read: np.ndarray, found: np.ndarray) -> History:
        """After a window: what was read, and the mean log lengths that were found."""
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
        """All of it, for a file."""
        return {
            "keys": np.array(list(self._lengths), np.uint64),
            "lengths": np.array(list(self._lengths.values()), np.float64).reshape(-1, 2),
            "square": self._square,
            "product": self._product,
        }

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray]) -> History:
        """From `arrays`; a KeyError or ValueError says what is missing or does not fit."""
        square, product = arrays["square"], arrays["product"]
        if square.shape != (3, 3) or product.shape != (3,):
            raise ValueError(f"history's square is {square.shape}, product {product.shape}")
        pairs = (tuple(pair) for pair in arrays["lengths"].tolist())
        return cls(dict(zip(arrays["keys"].tolist(), pairs, strict=True)), square.copy(), product.copy())
