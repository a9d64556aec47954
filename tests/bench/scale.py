"""CPU time of policy and control for a sample, in fleets of 10 to 10,000 generators: it may double.

Whole iterations in virtual time (`_events.py`), with the production planner, dispatcher and policy, and the
defaults of a run: groups of 8 with the paper's lengths and latency curve, a sample for each slot, all
admitted at the start. Small fleets make iterations until enough samples are counted. All seconds are of this
machine's CPU.

plan       problems ranked, prompts made
dispatch   admit, deal, finish, correct its group's beliefs, look for drifts, forget
reports    of all generators for as long as the iteration takes: beats, lists of samples, looks for the silent
choices    plans that are chosen beside the dispatcher; no part of the sum, since they have a thread of their
           own, which rests between two of them

cpu_us_per_sample           plan + dispatch + reports, by number of generators
growth                      the most that a fleet takes over what any smaller one does
report_bytes_per_s          that a generator with 256 samples writes to its topic
first_deal_s                from the admission to the first jobs that generators get, by number of generators
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from producers.dispatch.jobs import SampleJob
from producers.dispatch.service import LATENCY_S
from producers.engines.engine import Pace
from producers.generator_reports import GeneratorReports, GeneratorState
from producers.planner import Planner
from producers.ranker.ranker import question_of
from schemas.messages import Prompt
from tests.bench._events import iterate
from tests.bench._lengths import CURVE
from tests.bench._production import learned_of, production, spec_of
from tests.bench._workloads import Case, ToldLengths, Workload
from tests.bench.dispatch_scale import _reports_s
from tests.factories import make_context, make_spec

GENERATORS, SIZE = (10, 100, 1_000, 10_000), 8
SLOTS, QUICK_SLOTS = 96, 32
COUNTED, QUICK_COUNTED = 20_000, 2_000  # samples at least, of all iterations of a fleet
_PROMPT = [0] * 200
_REPORTED_S, _HELD = 600.0, 256


@dataclass
class _Cost:
    """CPU seconds of some iterations."""

    samples: int = 0
    plan_s: float = 0.0
    dispatch_s: float = 0.0
    reports_s: float = 0.0
    choices_s: float = 0.0
    first_deal_s: list[float] = field(default_factory=list)

    def us(self, seconds: float) -> float:
        """Microseconds for each sample."""
        return seconds / self.samples * 1e6

    @property
    def all_us(self) -> float:
        """What is counted of a sample."""
        return self.us(self.plan_s + self.dispatch_s + self.reports_s)


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench scale")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--generators", type=int, nargs="+", default=list(GENERATORS))
    parser.add_argument("--slots", type=int, default=QUICK_SLOTS if quick else SLOTS)
    given = parser.parse_args(argv)
    costs = {}
    for generators in given.generators:
        Console(stderr=True).print(f"{generators} generators, {generators * given.slots} samples …")
        counted = QUICK_COUNTED if quick else COUNTED
        costs[generators] = _cost(generators, given.slots, given.seed, counted)
    return _printed(costs)


def _cost(generators: int, slots: int, seed: int, counted: int) -> _Cost:
    found, each = _Cost(), generators * slots // SIZE * SIZE
    reports_s = _reports_s(generators)
    for number in range(-(-counted // each)):
        rng = np.random.default_rng([seed, generators, number])
        now, before = Case("paper", "symmetric", size=SIZE).draw(rng, each)
        prompts, plan_s = _planned(now)
        jobs = [SampleJob(prompt, index) for prompt in prompts for index in range(SIZE)]
        true = now.true.reshape(-1, SIZE)
        lengths = {job.key: int(true[job.key]) for job in jobs}
        policy = production(learned_of(before), seed=int(rng.integers(1 << 30)))
        made = iterate(jobs, lengths, [CURVE.table(slots)] * generators, policy, latency_s=LATENCY_S)
        found.samples += each
        found.plan_s += plan_s
        found.dispatch_s += made.dispatch_s
        found.reports_s += reports_s * made.makespan_s
        found.choices_s += sum(made.choices_s)
        found.first_deal_s.append(made.first_deal_s)
    return found


def _planned(workload: Workload) -> tuple[list[Prompt], float]:
    """The prompts of an iteration, and the CPU seconds that their planning took."""
    groups = len(workload.group) // SIZE
    spec = spec_of(algorithm={"groups": groups, "group_size": SIZE, "iterations": 1}, task={"shuffle": False})
    told = dict(zip(workload.group.tolist(), workload.predicted.tolist(), strict=True))
    said = ToldLengths({question_of(str(one), None, []).key: told[one] for one in range(groups)})
    problems = [{"id": str(group), "prompt": str(group)} for group in range(groups)]
    planner = Planner("bench", spec, problems, lambda text: _PROMPT)
    began = time.thread_time()
    prompts = planner.admit(lambda version: said)
    return prompts, time.thread_time() - began


def _report_bytes_per_s() -> float:
    """Bytes that a generator writes a second while it has many samples, by the code of a generator."""
    held = [((group, 0), 100 * group) for group in range(_HELD)]
    state = GeneratorState(Pace([1, _HELD], [0.01, 0.02]), 3, held)
    now = 0.0
    with tempfile.TemporaryDirectory() as folder:
        context = make_context(make_spec(generator={"slots": _HELD}), Path(folder), role="generator")
        reporting = GeneratorReports(context, "start", lambda: now)
        while now < _REPORTED_S:
            reporting.report(lambda: state)
            now += 0.1
        topic = context.topics.generators
        reader = context.bus.reader(topic, {0: 0})
        return sum(len(record.value) for record in reader.poll(0.0, 100_000)) / _REPORTED_S


def _printed(costs: dict[int, _Cost]) -> dict[str, Any]:
    table = Table(title="CPU time of policy and control for a sample, µs")
    for column in ("generators", "samples", "plan", "dispatch", "reports", "sum", "choices", "first deal s"):
        table.add_column(column, justify="right")
    for generators, cost in costs.items():
        parts = cost.plan_s, cost.dispatch_s, cost.reports_s
        table.add_row(
            str(generators), str(cost.samples), *(f"{cost.us(part):.1f}" for part in parts),
            f"{cost.all_us:.1f}", f"{cost.us(cost.choices_s):.1f}", f"{np.median(cost.first_deal_s):.2f}",
        )  # fmt: skip
    Console(width=120).print(table)
    by_size = [cost.all_us for _, cost in sorted(costs.items())]
    growth = [large / small for place, large in enumerate(by_size) for small in by_size[:place]]
    return {
        "cpu_us_per_sample": {str(count): round(cost.all_us, 1) for count, cost in costs.items()},
        "growth": round(max(growth, default=1.0), 2),
        "report_bytes_per_s": round(_report_bytes_per_s(), 1),
        "first_deal_s": {str(n): round(float(np.median(one.first_deal_s)), 2) for n, one in costs.items()},
    }
