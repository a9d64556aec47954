"""CPU time of policy and control for a sample, in fleets of 10 to 10,000 generators: it may double.

`--quick` takes about five minutes, all of it an hour; `--whole` instead simulates a run of 10,000 generators
and a million samples in two to five minutes, with 2 GB of memory (with `--quick` a tenth of both, in one).

Whole iterations in virtual time (`_events.py`), with the production planner, dispatcher and policy, and the
defaults of a run: groups of 8 with the paper's lengths and latency curve, a sample for each slot, all
admitted at the start. Small fleets make iterations until enough samples are counted. All seconds are of this
machine's CPU.

plan       problems ranked, prompts made
dispatch   admit, deal, finish, correct its group's beliefs, look for drifts, forget
reports    of all generators for as long as the iteration takes: beats, lists of samples, looks for the silent
choices    plans that are chosen beside the dispatcher; no part of the sum, since they have a thread of their
           own, which rests between two of them

cpu_us_per_sample           plan + dispatch + reports, by number of generators: medians of the iterations
growth                      the most that a fleet takes over what any smaller one does
largest_over_least          of all fleets: small ones take more, for the fixed work of an iteration
report_bytes_per_s          that a generator with 256 samples writes to its topic
first_deal_s                from the admission to the first jobs that generators get, by number of generators
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from tests.bench._charts import drawn
from tests.bench._events import iterate
from tests.bench._large_simulation import fewest_steps, whole_run
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
_PARTS = {"counted_s": "sum", "dispatch_s": "dispatch", "reports_s": "reports", "plan_s": "plan"}
_REPEATED = 5  # a fleet of ten has few reports to measure


@dataclass(frozen=True)
class _Iteration:
    """CPU seconds of an iteration."""

    plan_s: float
    dispatch_s: float
    reports_s: float
    choices_s: float
    first_deal_s: float

    @property
    def counted_s(self) -> float:
        """All but the choices, which have a thread of their own."""
        return self.plan_s + self.dispatch_s + self.reports_s


@dataclass(frozen=True)
class _Cost:
    """The iterations of a fleet, each of so many samples."""

    each: int
    iterations: list[_Iteration]

    def us(self, part: str) -> float:
        """Microseconds for each sample: the median of the iterations, which others on the machine disturb."""
        return float(np.median([getattr(one, part) for one in self.iterations])) / self.each * 1e6

    @property
    def first_deal_s(self) -> float:
        """Seconds from an admission to the first jobs."""
        return float(np.median([one.first_deal_s for one in self.iterations]))


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench scale", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--generators", type=int, nargs="+", default=list(GENERATORS))
    parser.add_argument("--slots", type=int, default=QUICK_SLOTS if quick else SLOTS)
    parser.add_argument("--whole", action="store_true", help="simulate a whole run of the largest fleet")
    parser.add_argument("--draw", type=Path, help="draw the time by generators into this file")
    given = parser.parse_args(argv)
    if given.whole:
        return whole_run(*((1_000, 100_000) if quick else (10_000, 1_000_000)), given.seed)
    costs = {}
    for generators in given.generators:
        Console(stderr=True).print(f"{generators} generators, {generators * given.slots} samples …")
        counted = QUICK_COUNTED if quick else COUNTED
        costs[generators] = _cost(generators, given.slots, given.seed, counted)
    if given.draw:
        _draw(costs, given.draw)
    return _printed(costs)


def _cost(generators: int, slots: int, seed: int, counted: int) -> _Cost:
    each = generators * slots // SIZE * SIZE
    reports_s = float(np.median([_reports_s(generators) for _ in range(_REPEATED)]))
    found = []
    for number in range(-(-counted // each)):
        rng = np.random.default_rng([seed, generators, number])
        now, before = Case("paper", "symmetric", size=SIZE).draw(rng, each)
        prompts, plan_s = _planned(now)
        jobs = [SampleJob(prompt, index) for prompt in prompts for index in range(SIZE)]
        true = now.true.reshape(-1, SIZE)
        lengths = {job.key: int(true[job.key]) for job in jobs}
        policy = production(learned_of(before), seed=int(rng.integers(1 << 30)))
        made = iterate(jobs, lengths, [CURVE.table(slots)] * generators, policy, latency_s=LATENCY_S)
        found.append(
            _Iteration(plan_s, made.dispatch_s, reports_s * made.makespan_s, sum(made.choices_s),
                       made.first_deal_s)
        )  # fmt: skip
    return _Cost(each, found)


def _planned(workload: Workload) -> tuple[list[Prompt], float]:
    """The prompts of an iteration, and the CPU seconds that their planning took."""
    groups = len(workload.group) // SIZE
    steps = fewest_steps(groups, SIZE)
    spec = spec_of(
        algorithm={"groups": groups, "group_size": SIZE, "iterations": 1, "optimizer_steps": steps},
        task={"shuffle": False},
    )
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


def _draw(costs: dict[int, _Cost], file: Path) -> None:
    with drawn(file, "CPU time of policy and control for a sample", high=4.0) as axes:
        for part, name in _PARTS.items():
            axes.plot(list(costs), [cost.us(part) for cost in costs.values()], marker="o", label=name)
        axes.set(xscale="log", xlabel="generators", ylabel="µs")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)


def _printed(costs: dict[int, _Cost]) -> dict[str, Any]:
    table = Table(title="CPU time of policy and control for a sample, µs")
    for column in ("generators", "samples", "plan", "dispatch", "reports", "sum", "choices", "first deal s"):
        table.add_column(column, justify="right")
    for generators, cost in costs.items():
        parts = ("plan_s", "dispatch_s", "reports_s", "counted_s", "choices_s")
        table.add_row(
            str(generators), str(cost.each * len(cost.iterations)),
            *(f"{cost.us(part):.1f}" for part in parts), f"{cost.first_deal_s:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)
    by_size = {str(generators): cost.us("counted_s") for generators, cost in sorted(costs.items())}
    in_order = list(by_size.values())
    growth = [large / small for place, large in enumerate(in_order) for small in in_order[:place]]
    return {
        "cpu_us_per_sample": {count: round(us, 1) for count, us in by_size.items()},
        "growth": round(max(growth, default=1.0), 2),
        "largest_over_least": round(max(by_size.values()) / min(by_size.values()), 2),
        "report_bytes_per_s": round(_report_bytes_per_s(), 1),
        "first_deal_s": {str(count): round(cost.first_deal_s, 2) for count, cost in costs.items()},
    }
