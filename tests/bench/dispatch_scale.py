"""What dispatch costs in large fleets: a whole iteration at 10, 100 and 1,000 generators of 256 slots.

The production dispatcher and policy, with a run's defaults, in virtual time (`_events.py`): groups of 8 with
the paper's lengths and latency curve, all admitted at the start. All seconds are of this machine's CPU, and a
plan is there as much later as its choice took.

first_deal_s        from the beginning of the admission to the first jobs that generators get
dealt_s             until the last job is dealt that begins before any sample ends (virtual time, with waits)
choice_s            the longest choice of a plan, beside the dispatcher
us_per_sample       all else that the dispatcher does in a sample's life: admit, deal, finish, correct its
                    group's beliefs, look for drifts, forget
bytes_per_sample    all that the dispatcher holds when a quarter of the samples is done, prompts left out
reports_ms_per_s    a second of all generators' reports: one each 3 s, and a list of all samples each 36 s
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from producers.dispatch import beat_s
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.fleet import Fleet
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.policies.policy import Policy
from producers.dispatch.service import LATENCY_S
from schemas.messages import TRAIN, GeneratorReport, Prompt
from tests.bench._events import iterate
from tests.bench._lengths import CURVE, bound
from tests.bench._production import learned_of, production
from tests.bench._workloads import Case, Workload

GENERATORS, SLOTS, SIZE = (10, 100, 1000), 256, 8
SILENCE_S = 30.0
LIST_S = 36.0  # between two lists of a generator with 256 samples: 100 bytes a second


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench dispatch_scale")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--generators", type=int, nargs="+", default=list(GENERATORS))
    parser.add_argument("--per-slot", type=int, nargs="+", default=[1] if quick else [1, 2], help="samples")
    parser.add_argument("--error", default="symmetric", help="of the ranker, as in `_workloads.py`")
    parser.add_argument("--simple", action="store_true", help="longest_first, too")
    given = parser.parse_args(argv)
    rows = []
    for generators in given.generators:
        for per_slot in given.per_slot:
            for simple in (False, True) if given.simple else (False,):
                rng = np.random.default_rng([given.seed, generators, per_slot])
                Console(stderr=True).print(f"{generators} generators, {per_slot} samples a slot …")
                rows.append(_one(generators, per_slot * generators * SLOTS, given.error, rng, simple=simple))
    return _printed(rows)


def _one(
    generators: int, samples: int, error: str, rng: np.random.Generator, *, simple: bool
) -> dict[str, Any]:
    """One iteration of a fleet."""
    now, before = Case("paper", error, size=SIZE).draw(rng, samples)
    learned = learned_of(before)
    policy: Policy = LongestFirst(learned) if simple else production(learned, seed=int(rng.integers(1 << 30)))
    jobs = _jobs(now)
    lengths = {job.key: int(length) for job, length in zip(jobs, now.true, strict=True)}
    tables = [CURVE.table(SLOTS)] * generators
    held: list[int] = []
    prompts = {id(job.prompt) for job in jobs}
    gc.collect()
    found = iterate(
        jobs, lengths, tables, policy, latency_s=LATENCY_S,
        midway=lambda dispatcher: held.append(_bytes_of(dispatcher, prompts)),
    )  # fmt: skip
    return {
        "policy": "longest_first" if simple else "deadline", "generators": generators, "slots": SLOTS,
        "samples": samples, "first_deal_s": found.first_deal_s, "dealt_s": found.dealt_s,
        "choice_s": max(found.choices_s, default=0.0), "choices": len(found.choices_s),
        "us_per_sample": found.dispatch_s / samples * 1e6, "longest_turn_s": found.longest_turn_s,
        "bytes_per_sample": held[0] / samples, "reports_ms_per_s": _reports_s(generators) * 1e3,
        "over_bound": found.makespan_s / bound(now.true.tolist(), tables),
    }  # fmt: skip


def _jobs(workload: Workload) -> list[SampleJob]:
    """As the feeder admits them."""
    prompts: dict[int, Prompt] = {}
    jobs: list[SampleJob] = []
    for group, predicted in zip(workload.group.tolist(), workload.predicted.tolist(), strict=True):
        if group not in prompts:
            prompts[group] = Prompt(
                run="bench", purpose=TRAIN, group=group, size=SIZE, problem_id=str(group), problem="{}",
                epoch=0, tokens=np.zeros(0, np.int32), iteration=0, mini=0, bundle=group, bundle_groups=1,
                min_version=0, predicted=predicted, predictor="", length_class=0, edges=[], admitted_at=0.0,
            )  # fmt: skip
        jobs.append(SampleJob(prompts[group], len(jobs) % SIZE))
    return jobs


def _bytes_of(thing: object, but: set[int]) -> int:
    """Bytes of all objects that one leads to, `but` some, and but types, modules and functions."""
    seen, todo, found = set(but), [thing], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or callable(one) or isinstance(one, (type, type(sys))):
            continue
        seen.add(id(one))
        found += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return found


def _reports_s(generators: int) -> float:
    """CPU seconds of one second of all generators' reports."""
    fleet = Fleet(
        Dispatcher(LongestFirst()), logging.getLogger("bench"), slots=SLOTS, silence_s=SILENCE_S, now=0.0
    )
    names = [f"g{number:04d}" for number in range(generators)]
    for name in names:
        fleet.heard(_report(name, 0, whole=True), 0.0)
    beats = [_report(name, 0, whole=False) for name in names]
    lists = [_report(name, number, whole=True) for number, name in enumerate(names[:100])]
    began = time.thread_time()
    for beat in beats:
        fleet.heard(beat, 1.0)
    each_s = (time.thread_time() - began) / len(beats)
    began = time.thread_time()
    for one in lists:
        fleet.heard(one, 1.0)
    list_s = (time.thread_time() - began) / len(lists)
    began = time.thread_time()
    for tenth in range(10):
        fleet.bury_the_silent(1.0 + tenth / 10)
    return generators * (each_s / beat_s(SILENCE_S) + list_s / LIST_S) + time.thread_time() - began


def _report(name: str, number: int, *, whole: bool) -> GeneratorReport:
    count = SLOTS if whole else 0
    return GeneratorReport(
        run="bench", generator=name, start="1", slots=SLOTS, batches=[1, SLOTS] if whole else [],
        seconds=[0.0084, 0.0215] if whole else [], version=0,
        groups=np.arange(count, dtype=np.int64) + number * count, indexes=np.zeros(count, np.int16),
        tokens=np.full(count, 100, np.int32), returned=[], leaving=False, sent_at=0.0, whole=whole,
    )  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="one iteration by size of the fleet")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    return table


def _printed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    Console(width=170).print(_table(rows))
    return {"rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]}
