"""A whole run of a large fleet in virtual time: the seconds and the memory that its simulation takes here."""

from __future__ import annotations

import resource
import time
from typing import Any

from flows.planning.stage_times import EngineTimes, LearnerTimes
from flows.planning.workload import LengthHistogram, LogNormalLengths, Workload
from flows.simulation.simulated_run import SimulatedRun, SimulatedSite
from flows.simulation.world import simulate
from schemas.algorithm import MOST_OF_STEP
from tests.bench._lengths import CURVE, EDGES, SHARES
from tests.factories import make_spec

_SIZE, _ITERATIONS, _SLOTS = 8, 4, 32
_LONGEST = 20_000
_TOKEN_S = 1e-8  # of training: generation is the slower side


def fewest_steps(groups: int, size: int) -> int:
    """Return the fewest optimizer steps of an iteration whose records hold its samples."""
    return next(n for n in range(1, groups + 1) if groups % n == 0 and groups * size // n <= MOST_OF_STEP)


def whole_run(generators: int, samples: int, seed: int) -> dict[str, Any]:
    """Simulate so many generators and samples in mode async. Return the seconds and bytes that it took."""
    groups = samples // _SIZE // _ITERATIONS
    spec = make_spec(
        sampling={"max_tokens": _LONGEST, "max_prompt_tokens": 500},
        trainer={"microbatch_tokens": 2 * _LONGEST}, generator={"slots": _SLOTS},
        algorithm={
            "mode": "async", "staleness": 1, "iterations": _ITERATIONS,
            "groups": groups, "group_size": _SIZE, "optimizer_steps": fewest_steps(groups, _SIZE),
        },
    )  # fmt: skip
    engine = EngineTimes(tuple(float(one) for one in CURVE.table(_SLOTS)))
    run = SimulatedRun(
        spec, LearnerTimes(_TOKEN_S), (SimulatedSite("here", (engine,) * generators),),
        Workload(LengthHistogram(EDGES, SHARES), LogNormalLengths(200)), seed=seed,
    )  # fmt: skip
    began, cpu_began = time.monotonic(), time.process_time()
    found = simulate(run)
    cpu_s = time.process_time() - cpu_began
    return {
        "generators": generators, "samples": found.samples, "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s, 1), "cpu_us_per_sample": round(cpu_s / found.samples * 1e6, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "virtual_s": round(found.ended_at, 1), "samples_per_s": round(found.samples_per_s, 1),
    }  # fmt: skip
