"""Declared lengths of beliefs that were corrected by what is known of their groups, many at a time.

A corrected belief is its prior, read at other scores: it need not be kept, and is computed here when a length
is declared. Compiled.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from producers.dispatch.makespan import declared


@njit(cache=True, nogil=True)
def _read(prior: np.ndarray, levels: np.ndarray, mean: float, spread: float, row: np.ndarray) -> None:
    """Read a prior at other scores, into `row`: as `np.interp` does."""
    count = len(levels)
    low = 0
    for place in range(count):
        score = mean + spread * levels[place]
        while low < count - 2 and levels[low + 1] <= score:
            low += 1
        if score <= levels[0]:
            row[place] = prior[0]
        elif score >= levels[count - 1]:
            row[place] = prior[count - 1]
        else:
            slope = (prior[low + 1] - prior[low]) / (levels[low + 1] - levels[low])
            row[place] = slope * (score - levels[low]) + prior[low]


@njit(cache=True, nogil=True)
def corrected_rows(priors: np.ndarray, levels: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return each sample's belief.

    samples: a column for each: its row of `priors`; mean and spread of the scores at which that is read (a
    spread of 0: as it is).
    """
    count = samples.shape[1]
    rows = np.empty((count, len(levels)))
    for sample in range(count):
        prior = priors[int(samples[0, sample])]
        if samples[2, sample] == 0.0:
            rows[sample] = prior
        else:
            _read(prior, levels, samples[1, sample], samples[2, sample], rows[sample])
    return rows


@njit(cache=True, nogil=True)
def declared_each(priors: np.ndarray, levels: np.ndarray, samples: np.ndarray, z: float) -> np.ndarray:
    """Return each sample's declared length. samples: see `corrected_rows`, and the tokens that it has."""
    count = samples.shape[1]
    found = np.empty(count)
    row = np.empty(len(levels))
    for sample in range(count):
        prior = priors[int(samples[0, sample])]
        if samples[2, sample] == 0.0:
            found[sample] = declared(prior, samples[3, sample], z)
        else:
            _read(prior, levels, samples[1, sample], samples[2, sample], row)
            found[sample] = declared(row, samples[3, sample], z)
    return found
