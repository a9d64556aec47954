"""The paper's cells with our own scheduling: dispatch, admission, order and deltas are the product's code.

The simulator runs some iterations. Samples of the next one are begun while the last ones of this one are
drawn, so no engine waits for the longest sample, as it does in the paper's batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flows.planning.hardware import Hardware
from flows.planning.roofline import BudgetError, learner_times
from flows.planning.workload import LengthHistogram, LogNormalLengths, Workload
from flows.simulation.simulated_run import SimulatedRun, SimulatedSite
from flows.simulation.world import simulate
from tests.bench._lengths import EDGES, SHARES
from tests.bench._paper_figures import BATCH
from tests.bench._paper_stages import PPO, PROMPT, RANKER_SIGMA, Stages
from tests.factories import make_spec

DELTA_SHARE = 0.025  # of the weights' bytes that a version sends: docs/weights.md
SIZE = 2  # samples of a group: the smallest that there is; the paper's PPO has none


@dataclass(frozen=True)
class OurCell:
    """A cell with our own scheduling."""

    seconds: float  # of an iteration
    generating: int  # GPUs
    devices: int  # that share an engine's tensors


def ours(
    stages: Stages,
    hardware: Hardware,
    gpus: int,
    longest: int,
    policy: str,
    mode: str,
    shares: Sequence[float],
) -> OurCell:
    """Return the best of some splits of the GPUs, with engines as large as the heads allow."""
    found = []
    for share in shares:
        generating = round(gpus * share / 8) * 8 or 4
        for devices in stages.tensor_parallels()[-1:]:
            try:
                seconds = _simulated(stages, hardware, gpus, generating, devices, longest, policy, mode)
            except BudgetError:
                continue
            found.append(OurCell(seconds, generating, devices))
    return min(found, key=lambda cell: cell.seconds)


def _simulated(
    stages: Stages, hardware: Hardware, gpus: int, generating: int, devices: int, longest: int, policy: str,
    mode: str,
) -> float:  # fmt: skip
    edges = tuple(float(edge) * longest / 20_000 for edge in EDGES)
    workload = Workload(
        LengthHistogram(edges, SHARES),
        LogNormalLengths(PROMPT),
        between_groups=0.9,
        ranker_sigma=RANKER_SIGMA,
    )
    spec = make_spec(
        sampling={"max_tokens": longest, "max_prompt_tokens": 2 * PROMPT},
        trainer={"microbatch_tokens": 65_536}, dispatch={"policy": policy},
        algorithm={
            "mode": mode, "staleness": int(mode == "async"), "groups": BATCH // SIZE, "group_size": SIZE,
            "iterations": 10 if mode == "async" else 2,
        },
    )  # fmt: skip
    typical = float(np.average((np.array(edges[1:]) + np.array(edges[:-1])) / 2, weights=SHARES)) + PROMPT
    learner = learner_times(
        stages.shape, hardware, devices=gpus - generating, length=typical, recipe=PPO, sent_share=DELTA_SHARE,
        efficiency=stages.efficiency,
    )  # fmt: skip
    engine = stages.engine(hardware, devices, longest)
    site = SimulatedSite("here", (engine,) * (generating // devices))
    return simulate(SimulatedRun(spec, learner, (site,), workload)).step_s
