"""Where the time of a predicted run goes, with ranges, and the picture of one of its iterations.

It takes some simulations more than the speed alone, so it is told after that.
"""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Sequence

from flows.planning.step_estimate import MachineSplit
from flows.plans.drawn_factors import drawn_factors
from flows.plans.interval import Interval
from flows.plans.plan_pages import draw_simulation
from flows.plans.plan_rows import TAIL, figure, interval_row, split_words
from flows.plans.planning_inputs import PlanningInputs
from flows.plans.run_plan import interval_around, waits_of
from flows.plans.simulated_split import simulated_run, simulated_split, split_figures
from flows.simulation.world import simulate

_DRAWS, _FEWEST = 8, 4
_BUDGET_S = 4.0  # CPU seconds for them all, about: the run may want the cores


def iteration_row(inputs: PlanningInputs, split: MachineSplit, iterations: int) -> dict[str, object]:
    """Return the shares of both sides' time that are no work, by cause, and a picture in base64."""
    spec, middle, began = inputs.spec, iterations // 2, time.process_time()
    found = simulate(simulated_run(spec, split, inputs.workload, iterations=iterations, picture_of=middle))
    each_s = time.process_time() - began
    figures = split_figures(split, found, spec.algorithm.groups * spec.algorithm.group_size)
    draws = _DRAWS if _DRAWS * each_s <= _BUDGET_S else _FEWEST
    others = [
        simulated_split(spec, split, inputs.workload, iterations=iterations, seed=number + 1,
                        scaled=scaled)
        for number, scaled in enumerate(drawn_factors(inputs, split, draws))
    ]  # fmt: skip
    generators, trainer = split_words(split)
    title = f"{spec.run}: a step takes {figure(figures.step_s)} s\n{generators}; trainer: {trainer}"
    image = io.BytesIO()
    draw_simulation(found, split, middle, title, image)
    return {
        "generators": _ranges([dict(one.generators) for one in (figures, *others)]),
        "trainer": _ranges([dict(one.trainer) for one in (figures, *others)]),
        "picture": base64.b64encode(image.getvalue()).decode(),
    }


def _ranges(all_shares: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the first one's shares of no work, each with its range over the others."""
    first, *others = all_shares
    causes = {cause for shares in all_shares for cause in (*waits_of(shares), TAIL) if cause in shares}
    return {
        cause: interval_row(share_range(first[cause], [one[cause] for one in others]))
        for cause in sorted(causes)
    }


def share_range(share: float, others: Sequence[float]) -> Interval:
    """Return a share with the range of nine in ten. `others`: of the same thing in other draws."""
    # Shares may be 0, so their differences are looked at, and not their ratios.
    around = interval_around(1.0, [one - share for one in others])
    return Interval(share, max(0.0, share + math.log(around.low)), min(1.0, share + math.log(around.high)))
