"""Infers the part that all scores of a group have in common, from its finished and running samples.

The one function here is plain Python, for a single group; `corrected.py` has the same one compiled, for many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Numbers = list[float] | np.ndarray


def common_parts(
    rho: float, done: tuple[int, float], floors: Sequence[float] | np.ndarray, means: Numbers,
    variances: Numbers,
) -> None:  # fmt: skip
    """Fill in means and variances of a group's common part: the last by all that is known of the group.

    At each floor's place, they are those without this floor. done: the number of finished samples, and the
    sum of their scores. floors: scores that running samples exceed. These are taken into account one after
    the other; each result is replaced by the normal distribution of its mean and variance.
    """
    count, total = done
    last = len(floors)
    means[last] = rho * total / (1 - rho + rho * count)
    variances[last] = rho * (1 - rho) / (1 - rho + rho * count)
    for place in range(last):
        means[place], variances[place] = means[last], variances[last]
        for other in range(place + 1):
            mine = other if other < place else last
            mean, variance = means[mine], variances[mine]
            deviation = math.sqrt(variance + 1 - rho)
            above = (floors[place] - mean) / deviation
            share = 0.5 * math.erfc(above / math.sqrt(2))
            if share < 1e-9:
                hazard = above + 1 / above
            else:
                hazard = math.exp(-0.5 * above * above) / math.sqrt(2 * math.pi) / share
            gain = variance / deviation
            means[mine] = mean + gain * hazard
            variances[mine] = variance - gain * gain * hazard * (hazard - above)
    for place in range(last + 1):
        variances[place] = max(variances[place], 1e-9)
