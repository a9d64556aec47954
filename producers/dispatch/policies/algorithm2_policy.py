"""The paper's dispatch (Algorithm 2) as printed, for comparison.

The longest fifth of the prompts is long-tailed. The generators are split into a long and a regular pool: the
split with the least sum of the pools' latencies is taken. A pool's latency is estimated as `PTL(BS) * L *
ceil(M / BS)`, with L the 90th (long) or 50th (regular) percentile of the lengths, M prompts on a generator
and BS its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import DealtPolicy, PolicySettings
from schemas.runspec import RunSpec

LONG_SHARE = 0.2


class Algorithm2Settings(PolicySettings):
    """Settings of algorithm2."""

    def make(self, spec: RunSpec) -> Algorithm2:
        return Algorithm2()


class Algorithm2(DealtPolicy):
    """Two pools of generators; longest first on each generator."""

    longest_first = True

    def deal(
        self, board: Board, jobs: Sequence[SampleJob], names: Sequence[str]
    ) -> dict[str, list[SampleJob]]:
        ordered = sorted(jobs, key=lambda job: (-job.prompt.predicted, job.key))
        if len(names) == 1:
            return {names[0]: ordered}
        lengths = np.array([job.prompt.predicted for job in ordered])
        count = math.ceil(LONG_SHARE * len(ordered))
        long, regular = ordered[:count], ordered[count:]
        generator = board.generators[names[0]]  # as printed: all generators are alike
        pools = min(
            range(1, len(names)),
            key=lambda size: (
                _latency(generator, len(long), float(np.percentile(lengths, 90)), size)
                + _latency(generator, len(regular), float(np.percentile(lengths, 50)), len(names) - size)
            ),
        )
        dealt = {name: long[place:count:pools] for place, name in enumerate(names[:pools])}
        others = names[pools:]
        return dealt | {name: regular[place :: len(others)] for place, name in enumerate(others)}


def _latency(generator: BoardGenerator, prompts: int, length: float, generators: int) -> float:
    """Estimate a pool's latency in seconds (Equation 2)."""
    mine = math.ceil(prompts / generators)
    batch = max(1, min(mine, generator.slots))
    return float(generator.seconds[batch]) * length * math.ceil(mine / batch)
