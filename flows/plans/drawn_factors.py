"""Draws of how unsure times and lengths come out, for the range of a figure."""

from __future__ import annotations

import numpy as np

from flows.planning.step_estimate import MachineSplit
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.simulated_split import Scaled

FOUR = 4
# In two of four draws each part is one deviation above what is expected, and in two below. No two parts go
# together but links and lengths. So four draws shift nothing, and vary a figure by as much as it is unsure.
_SIGNS = np.array([
    [+1, +1, -1, +1],  # engines, learner, links, lengths
    [-1, +1, +1, -1],
    [+1, -1, +1, -1],
    [-1, -1, -1, +1],
])  # fmt: skip


def speed_spread(split: MachineSplit) -> float:
    """Return the relative standard deviation of the speed of all parts together."""
    return max(kind.engine.unsteady for kind, _ in split.generators)


def drawn_factors(inputs: PlanningInputs, split: MachineSplit, draws: int) -> list[Scaled]:
    """Return the factors of some draws, as far as the parts of a split are unsure.

    `draws`: a multiple of four.
    """
    engine = max(kind.engine.spread for kind, _ in split.generators)
    link = max((kind.pool.link.spread for kind, _ in split.generators if kind.pool.link), default=0.0)
    spreads = np.array([engine, split.trainer.learner.spread, link, inputs.lengths.spread])
    four = [Scaled(*map(float, row)) for row in np.exp(_SIGNS * spreads)]
    return four * (draws // FOUR)
