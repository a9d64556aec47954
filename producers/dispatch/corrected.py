"""Declared lengths of beliefs that were corrected by what is known of their groups, many at a time.

A corrected belief is its prior, read at other scores: it need not be kept, and is computed here when a length
is declared. Compiled.
"""

from __future__ import annotations

import math

import numpy as np

from infra.compiled import njit
from producers.dispatch.common_part import common_parts
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


_common_parts = njit(cache=True, nogil=True)(common_parts)


@njit(cache=True, nogil=True)
def parts_of_one(rho: float, count: int, total: float, floors: np.ndarray) -> np.ndarray:
    """Return means and variances of one group, a row each, as `common_parts` fills them in."""
    found = np.empty((2, len(floors) + 1))
    _common_parts(rho, (count, total), floors, found[0], found[1])
    return found


@njit(cache=True, nogil=True)
def _score(prior: np.ndarray, levels: np.ndarray, length: float) -> float:
    """Return the score of a length in a belief, as `np.interp` does."""
    place = np.searchsorted(prior, length, side="right") - 1
    if place < 0:
        return float(levels[0])
    if place >= len(levels) - 1:
        return float(levels[-1])
    slope = (levels[place + 1] - levels[place]) / (prior[place + 1] - prior[place])
    return float(slope * (length - prior[place]) + levels[place])


@njit(cache=True, nogil=True)
def corrected_parts(
    rho: float, priors: np.ndarray, levels: np.ndarray, samples: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Return mean and variance (a row each) of the common part that each sample (a column) goes by.

    samples: a column for each, group by group: its row of `priors`; its tokens, below 0 if it does not run.
    groups: a column for each: the number of its samples; that of its finished ones; the sum of their scores.
    A variance of -1: nothing is known of the group.
    """
    found = np.zeros((2, samples.shape[1]))
    first = 0
    for group in range(groups.shape[1]):
        size, done = int(groups[0, group]), int(groups[1, group])
        floors, which = np.empty(size), np.empty(size, np.int64)
        count = 0
        for sample in range(first, first + size):
            prior, tokens = priors[int(samples[0, sample])], samples[1, sample]
            if tokens > prior[0]:
                floors[count], which[count] = _score(prior, levels, tokens), sample
                count += 1
        means, variances = np.zeros(count + 1), np.full(count + 1, -1.0)
        if count or done:
            _common_parts(rho, (done, groups[2, group]), floors[:count], means, variances)
        found[0, first : first + size], found[1, first : first + size] = means[count], variances[count]
        for place in range(count):  # its own length must not count twice
            found[0, which[place]], found[1, which[place]] = means[place], variances[place]
        first += size
    return found


@njit(cache=True, nogil=True)
def corrected_rows(priors: np.ndarray, levels: np.ndarray, rest: float, samples: np.ndarray) -> np.ndarray:
    """Return each sample's belief.

    rest: variance of a score that its group does not tell of. samples: a column for each: its row of
    `priors`; mean and variance of the group's common part (below 0: the prior is read as it is).
    """
    count = samples.shape[1]
    rows = np.empty((count, len(levels)))
    for sample in range(count):
        prior = priors[int(samples[0, sample])]
        if samples[2, sample] < 0.0:
            rows[sample] = prior
        else:
            _read(prior, levels, samples[1, sample], math.sqrt(samples[2, sample] + rest), rows[sample])
    return rows


@njit(cache=True, nogil=True)
def declared_each(
    priors: np.ndarray, levels: np.ndarray, rest: float, samples: np.ndarray, z: float
) -> np.ndarray:
    """Return each sample's declared length. samples: see `corrected_rows`, and the tokens that it has."""
    count = samples.shape[1]
    found = np.empty(count)
    row = np.empty(len(levels))
    for sample in range(count):
        prior = priors[int(samples[0, sample])]
        if samples[2, sample] < 0.0:
            found[sample] = declared(prior, samples[3, sample], z)
        else:
            _read(prior, levels, samples[1, sample], math.sqrt(samples[2, sample] + rest), row)
            found[sample] = declared(row, samples[3, sample], z)
    return found
