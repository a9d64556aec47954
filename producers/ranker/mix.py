"""How much the network's word and the additive term's are worth, each beside the other.

    log length = a network + b additive + c

Fitted by least squares to groups as they were predicted before either had learned from them; recent
iterations count more. Neither weight is negative.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from producers.ranker.fit_sums import fit_sums

_BEFORE = np.array([0.5, 0.5, 0.0])  # while nothing is known
_DOUBT = 4.0  # how firmly that is believed, in squared log units
_FADE = 0.9  # of the fit's sums, from iteration to iteration


class Mix:
    """Sums of the fit. Immutable: `seen` returns the next one."""

    def __init__(self, square: np.ndarray | None = None, product: np.ndarray | None = None) -> None:
        self._square = np.zeros((3, 3)) if square is None else square
        self._product = np.zeros(3) if product is None else product
        self.worth = self._fitted()

    def _fitted(self) -> np.ndarray:
        """Return the weights of the network and of the additive term, and the constant."""
        square = self._square + _DOUBT * np.eye(3)
        product = self._product + _DOUBT * _BEFORE
        used = [0, 1, 2]
        while True:
            found = np.zeros(3)
            found[used] = np.linalg.solve(square[np.ix_(used, used)], product[used])
            if found[:2].min() >= 0:
                return found
            used.remove(int(np.argmin(found[:2])))

    def of(self, network: np.ndarray, additive: np.ndarray) -> np.ndarray:
        """Return what both together say."""
        return np.asarray(_columns(network, additive) @ self.worth)

    def seen(self, network: np.ndarray, additive: np.ndarray, found: np.ndarray) -> Mix:
        """Return the mix after groups of which both said this, and whose mean log lengths were `found`."""
        said = _columns(network, additive)
        return Mix(_FADE * self._square + said.T @ said, _FADE * self._product + said.T @ found)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the sums as arrays, for a file."""
        return {"square": self._square, "product": self._product}

    @classmethod
    def restored(cls, arrays: Mapping[str, np.ndarray]) -> Mix:
        """Restore a mix. Raises KeyError or ValueError if an array is missing or does not fit."""
        return cls(*fit_sums(arrays, "mix"))


def _columns(network: np.ndarray, additive: np.ndarray) -> np.ndarray:
    return np.stack([network, additive, np.ones(len(network))], axis=1)
