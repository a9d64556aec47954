"""Async runs in virtual time: trained samples a second, by shape, staleness, dispatch policy and order.

An iteration trains 1,024 samples in groups of 8, with the lengths of the StreamRL paper (up to 20K tokens)
and a ranker whose errors have a deviation of .25. The generators have the latency curve of a 7B model on one
H800. The learner alone would need half of the time that the generators would need with every slot full. All
that decides anything is the code of a run, with a run's defaults (`flows.simulation`); the dispatcher's own
time is charged.

A token that is computed anew is charged as prefill: `--on-update recompute` shows what running samples cost
that go on with a fresh KV cache.

`idle`: share of slot time without work. `staleness_mean`, `staleness_max`: of trained samples, in iterations.
`length_balance`: the mean length of what was trained over that of what was made, at worst over
staleness + cap iterations.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flows.planning.stage_times import EngineTimes, LearnerTimes
from flows.planning.workload import DrawnLengths
from flows.simulation.simulated_run import MessageTimes, SimulatedRun, SimulatedSite
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import World
from infra.choices import cores
from producers.dispatch.policies.policy import policy_of
from schemas.runspec import RunSpec
from tests.bench._virtual import PREFILL_S
from tests.bench._workloads import BUDGET, Case
from tests.factories import make_spec
from tests.waiting import wait_until

GROUPS, SIZE = 128, 8
STEP_S = 1.0  # optimizer step, publishing, and weights on their way
SHAPES = [(8, 64), (8, 128), (8, 256)]
POLICIES = ("deadline", "longest_first", "random")
COLUMNS = ("samples_per_s", "idle", "staleness_mean", "staleness_max", "length_balance")


@dataclass(frozen=True)
class _Run:
    """A row of the table."""

    generators: int
    slots: int
    k: float
    policy: str
    order: str
    iterations: int
    lengths: str
    cap: int | None
    seed: int
    on_update: str = "continue"

    def spec(self) -> RunSpec:
        algorithm: dict[str, Any] = {
            "mode": "async", "staleness": self.k, "order": self.order, "groups": GROUPS, "group_size": SIZE,
            "iterations": self.iterations, "staleness_cap": self.cap if self.order == "arrival" else None,
        }  # fmt: skip
        return make_spec(
            sampling={"max_tokens": BUDGET, "max_prompt_tokens": 8}, task={"shuffle": False}, seed=self.seed,
            trainer={"microbatch_tokens": 2 * BUDGET, "keep_weights": 256}, algorithm=algorithm,
            dispatch={"policy": self.policy},
            generator={"slots": self.slots, "on_update": self.on_update},
        )  # fmt: skip


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench streams")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--iterations", type=int, default=24 if quick else 60)
    parser.add_argument("--lengths", default="paper", help="a kind of lengths of the dispatch bench")
    parser.add_argument("--cap", type=int, help="algorithm.staleness_cap (default: as in a run)")
    parser.add_argument("--k", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--orders", nargs="+", default=["window", "arrival"])
    parser.add_argument("--on-update", choices=("continue", "recompute"), default="continue")
    parser.add_argument("--slots", type=int, nargs="+", default=[slots for _, slots in SHAPES])
    given = parser.parse_args(argv)
    runs = [
        _Run(8, slots, k, policy, order, given.iterations, given.lengths, given.cap, given.seed,
             given.on_update)
        for slots in given.slots for k in given.k for order in given.orders for policy in given.policies
    ]  # fmt: skip
    with ProcessPoolExecutor(cores(), get_context("fork")) as pool:
        found = list(track(pool.map(_row, runs), "streams", len(runs), console=Console(stderr=True)))
    _print(found)
    return {"rows": found}


def _row(run: _Run) -> dict[str, Any]:
    rng = np.random.default_rng([run.seed, 1])
    case = Case(run.lengths, "symmetric", size=SIZE)
    samples = case._draw(run.iterations * GROUPS * SIZE, lambda lengths, rng: lengths, rng)
    tables = case.tables(run.generators, run.slots)
    spec = run.spec()
    policy = policy_of(spec)
    if (warm := getattr(policy, "warm", None)) is not None:
        wait_until(warm, what="compiled code", deadline_s=120.0)  # in a run, while engines start
    first = np.unique(samples.group, return_index=True)[1]
    lengths = DrawnLengths(
        samples.true.reshape(-1, SIZE).astype(np.int64), np.zeros(len(first), np.int64),
        samples.predicted[first],
    )  # fmt: skip
    full = sum((len(table) - 1) / float(table[-1]) for table in tables)  # tokens a second, no slot empty
    engines = tuple(EngineTimes(tuple(table.tolist()), prefill_s=PREFILL_S) for table in tables)
    site = SimulatedSite("here", engines)
    learner = LearnerTimes(1 / (2 * full), step_s=STEP_S)
    simulated = SimulatedRun(
        spec, learner, (site,), lengths, seed=run.seed, messages=MessageTimes(measured=True)
    )
    result = World(simulated, policy).go()
    return {
        "shape": f"{run.generators} x {run.slots}", "k": run.k, "policy": run.policy, "order": run.order,
        **_figures(result, spec, run.generators * run.slots),
    }  # fmt: skip


def _figures(result: Simulation, spec: RunSpec, slots: int) -> dict[str, float]:
    """Without the beginning, when slots fill, and the end, when nothing is admitted any more."""
    algorithm = spec.algorithm
    reach = int(np.ceil(algorithm.staleness))
    first, last = reach + 2, len(result.steps) - reach - 2
    steps = result.steps[first + 1 : last + 1]
    seconds = result.between(first, last)
    idle_s = result.steps[last].idle_slots_s - result.steps[first].idle_slots_s
    staleness = np.concatenate([step.staleness for step in steps])
    return {
        "samples_per_s": round(len(steps) * GROUPS * SIZE / seconds, 3),
        "idle": round(idle_s / seconds / slots, 3),
        "staleness_mean": round(float(staleness.mean()), 2),
        "staleness_max": int(staleness.max()),
        "length_balance": round(_balance(result, reach + int(algorithm.most_stale)), 3),
    }


def _balance(result: Simulation, window: int) -> float:
    """The worst ratio of two mean lengths: of the samples trained in `window` iterations, and made then."""
    trained = np.cumsum([0, *(step.tokens for step in result.steps)])
    made = np.array([(0, 0), *(step.made for step in result.steps)])
    count, tokens = (made[window:] - made[:-window]).T
    ratios = (trained[window:] - trained[:-window]) / (window * GROUPS * SIZE) / (tokens / count)
    return float(ratios[np.argmax(np.abs(np.log(ratios)))])


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="trained samples a second, and how old they are")
    for column in ("shape", "k", "order", "policy", *COLUMNS):
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(row[column]) for column in ("shape", "k", "order", "policy", *COLUMNS)))
    Console(width=120).print(table)
