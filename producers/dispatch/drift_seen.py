"""Estimates how the samples of now differ from those that the beliefs were learned of.

There are three ways: all lengths are greater or smaller by one factor, as when the policy comes to think for
longer; all predictions are, as when the ranker is another one (both are called the shift); or a share of the
predictions is worthless (the wild ones). Samples that are done tell, and so do running ones: by being longer
than was believed, or as long. All are estimated together, by the likelihood of all that is seen, on a grid.
Small drifts are likely beforehand, and large ones possible. A drift is followed once it is likely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from producers.dispatch.beliefs import Beliefs
from producers.dispatch.drift import Drift

SHIFTS: np.ndarray = np.linspace(-1.2, 1.2, 49)  # of the log of lengths
WILD: np.ndarray = np.array([0.0, 0.03, 0.1, 0.2, 0.4, 0.8])  # shares of worthless predictions
_WILD_BEFORE = np.array([0.82, 0.08, 0.05, 0.03, 0.01, 0.01])
_STEADY, _USUAL, _UNUSUAL = 0.9, 0.05, 0.4  # so many iterations drift by _USUAL (deviation), others _UNUSUAL
_UNLIKELY = 1e-3  # no single sample makes a hypothesis impossible
# A drift is followed once it is likely. Before, plans for all that it may be would cost 1 to 2 %.
_LIKELY, _SMALL = 0.9, 0.06
_MOST = 4096  # samples that are looked at


def _before() -> np.ndarray:
    steady = np.exp(-0.5 * (SHIFTS / _USUAL) ** 2)
    other = np.exp(-0.5 * (SHIFTS / _UNUSUAL) ** 2)
    shifts = _STEADY * steady / steady.sum() + (1 - _STEADY) * other / other.sum()
    return np.log(shifts)[:, None] + np.log(_WILD_BEFORE)[None, :]


_BEFORE = _before()


@dataclass(frozen=True)
class SeenLengths:
    """Lengths as far as they are seen, one row a sample."""

    predicted: np.ndarray
    tokens: np.ndarray
    done: np.ndarray  # bool: `tokens` is the length; otherwise it is longer
    weight: np.ndarray  # what a row counts: less where it says the same as others of its group


def drift_of(beliefs: Beliefs, seen: SeenLengths) -> Drift:
    """Return the drift that is to be expected after what is seen."""
    if len(seen.predicted) > _MOST:
        rows = np.linspace(0, len(seen.predicted) - 1, _MOST).astype(int)
        scale = len(seen.predicted) / _MOST
        seen = SeenLengths(
            seen.predicted[rows], seen.tokens[rows], seen.done[rows], seen.weight[rows] * scale
        )
    posterior = np.stack([_BEFORE, _BEFORE])  # if lengths, or predictions, are shifted
    if len(seen.predicted):
        from producers.dispatch.drift_sums import summed_logs  # compiled: only who plans needs it

        order = np.argsort(seen.weight, kind="stable")
        predicted, tokens, done = seen.predicted[order], seen.tokens[order], seen.done[order]
        any_length = beliefs.likelihood_of_any(tokens, done)
        for kind in (0, 1):
            own = beliefs.likelihood(predicted, tokens, done, SHIFTS, of_predictions=bool(kind))
            posterior[kind] += summed_logs(own, any_length, seen.weight[order], WILD, _UNLIKELY)
    chances = np.exp(posterior - posterior.max())
    chances /= chances.sum()
    far, of_wild = chances[:, np.abs(SHIFTS) > _SMALL, :].sum(axis=(1, 2)), chances.sum(axis=(0, 1))
    shift = error = wild = 0.0
    kind = 0
    if far.sum() > _LIKELY:
        kind = int(far[1] > far[0])
        of_shift = chances[kind].sum(axis=1) / chances[kind].sum()
        shift = float(of_shift @ SHIFTS)
        error = float(np.sqrt(of_shift @ (SHIFTS - shift) ** 2))
    if of_wild[1:].sum() > _LIKELY:
        wild = float(of_wild @ WILD)
    return Drift(shift, error, wild, bool(kind))
