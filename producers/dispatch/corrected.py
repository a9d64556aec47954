"""Declared lengths of beliefs that were corrected by what is known of their groups, many at a time.

A corrected belief is its prior, read at other scores: it need not be kept, and is computed here when a length
is declared. Compiled.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from producers.dispatch.makespan import declared


@njit(cache=True, nogil=True)
def declared_each(
    priors: np.ndarray, levels: np.ndarray, means: np.ndarray, spreads: np.ndarray, tokens: np.ndarray,
    z: float,
) -> np.ndarray:  # fmt: skip
    """Return each sample's declared length, by a row of `priors`.

    means, spreads: of the scores at which the prior is read; a spread of 0: as it is.
    """
    found = np.empty(len(means))
    count = len(levels)
    row = np.empty(count)
    for sample in range(len(means)):
        prior = priors[sample]
        if spreads[sample] == 0.0:
            found[sample] = declared(prior, tokens[sample], z)
            continue
        low = 0
        for place in range(count):
            score = means[sample] + spreads[sample] * levels[place]
            while low < count - 2 and levels[low + 1] <= score:
                low += 1
            if score <= levels[0]:
                row[place] = prior[0]
            elif score >= levels[count - 1]:
                row[place] = prior[count - 1]
            else:
                slope = (prior[low + 1] - prior[low]) / (levels[low + 1] - levels[low])
                row[place] = slope * (score - levels[low]) + prior[low]
        found[sample] = declared(row, tokens[sample], z)
    return found
