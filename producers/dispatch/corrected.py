"""Declared lengths of beliefs that were corrected by what is known of their groups, many at a time.

A corrected belief is its prior, read at other scores: it need not be kept, and is computed here when a length
is declared. Compiled.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from producers.dispatch.makespan import declared


@njit(cache=True, nogil=True)
def declared_each(priors: np.ndarray, levels: np.ndarray, samples: np.ndarray, z: float) -> np.ndarray:
    """Return each sample's declared length.

    samples: a row for each: its row of `priors`; mean and spread of the scores at which that is read (a
    spread of 0: as it is); and the tokens that it has.
    """
    found = np.empty(len(samples))
    count = len(levels)
    row = np.empty(count)
    for sample in range(len(samples)):
        prior = priors[int(samples[sample, 0])]
        mean, spread, tokens = samples[sample, 1], samples[sample, 2], samples[sample, 3]
        if spread == 0.0:
            found[sample] = declared(prior, tokens, z)
            continue
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
        found[sample] = declared(row, tokens, z)
    return found
