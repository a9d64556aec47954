"""Generation time of one iteration by dispatch policy, on replayed lengths, in units of random FIFO.

1,024 samples, all waiting at the start, and what a ranker says of them: by kind of lengths and by kind of
error (`_workloads.py`). What the ranker's word is worth is learned from 4,096 samples before, as in a run; a
cold start has none. The feeder's planner, the dispatcher, its policies with a run's settings, and the
generators' core are the real ones, on `ReplayEngine`s in virtual time, to which the time is added that the
dispatcher took to decide. No policy knows more than a run would: `sampling.max_tokens` lies well above all
lengths. Only `*_oracle` are told the true lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from rich.console import Console
from rich.progress import track
from rich.table import Table

from infra.choices import cores
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.algorithm2_policy import Algorithm2
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.policies.policy import Policy
from producers.dispatch.policies.random_policy import RandomFifo
from producers.dispatch.policies.round_robin_policy import RoundRobin
from producers.planner import Planner
from producers.ranker.ranker import question_of
from tests.bench._gantt import draw as draw_gantt
from tests.bench._lengths import bound
from tests.bench._production import learned_of, production, spec_of
from tests.bench._virtual import Span, generate
from tests.bench._workloads import SAMPLES, Case, ToldLengths, Workload

SHAPES = [(generators, slots) for generators in (4, 8, 16) for slots in (32, 64, 256)]
SIX = [(4, 64), (4, 256), (8, 64), (8, 256), (16, 64), (16, 256)]  # with few slots all policies are alike
QUICK = [(4, 256), (8, 64), (16, 64)]
TABLE_LENGTHS = ("paper", "bimodal", "Pareto 1.5", "math", "near-uniform")
TABLE_ERRORS = ("regressed", "symmetric", "10 % wild, unseen", "twice too short, unseen", "cold")
MORE = (
    Case("paper", "symmetric", size=8), Case("paper", "symmetric", size=16),
    Case("paper", "symmetric", slow=2.0), Case("paper", "a fifth inverted"),
    Case("paper", "a fifth inverted, unseen"), Case("paper", "1.3 too short, unseen"),
    Case("paper", "1.3 too long, unseen"), Case("paper 10K", "symmetric"), Case("paper 5K", "symmetric"),
)  # fmt: skip
COLUMNS = (
    "fifo", "round_robin", "longest_first", "longest_first_corrected", "algorithm2", "algorithm2_oracle",
    "ours", "ours_oracle", "bound",
)  # fmt: skip
SIMPLE = ("fifo", "round_robin", "longest_first", "algorithm2")


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench dispatch")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument(
        "--draws", type=int, default=2 if quick else 10, help="of each case (default: %(default)s)"
    )
    parser.add_argument("--case", help="only the cases whose name or lengths have this in them")
    parser.add_argument("--possible", action="store_true", help="say what could be reached (slow)")
    parser.add_argument("--lengths", type=Path, help="a file with lengths of your own, one a line")
    parser.add_argument("--draw", type=Path, help="draw one iteration by policy (8 x 256) into this file")
    given = parser.parse_args(argv)
    if given.draw:
        _draw(given.draw, np.random.default_rng(given.seed))
    cases = _cases(given.lengths, quick)
    if given.case:
        cases = [case for case in cases if given.case in f"{case[0].name}, {case[0].lengths}"]
    draws = [(case, number) for case in range(len(cases)) for number in range(given.draws)]
    with ProcessPoolExecutor(
        cores(), get_context("fork"), _Drawing, (cases, given.seed, given.possible)
    ) as pool:  # fmt: skip
        found = pool.map(_Drawing.one, draws)
        measured = list(track(found, "dispatch", len(draws), console=Console(stderr=True)))
    rows = []
    for number, (case, (generators, slots)) in enumerate(cases):
        mine = measured[number * given.draws : (number + 1) * given.draws]
        means = {column: float(np.mean([one[column] for one in mine])) for column in mine[0]}
        rows.append(
            {"case": case.name, "lengths": case.lengths, "generators": generators, "slots": slots, **means}
        )
    return _report(rows)


class _Drawing:
    """A process that makes draws, of cases that it was born with: they hold functions, which don't travel."""

    _mine: _Drawing

    def __init__(self, cases: Sequence[tuple[Case, tuple[int, int]]], seed: int, possible: bool) -> None:
        self._cases, self._seed, self._possible = cases, seed, possible
        _Drawing._mine = self

    @staticmethod
    def one(draw: tuple[int, int]) -> dict[str, float]:
        """All policies on one draw of one case."""
        mine, (place, number) = _Drawing._mine, draw
        case, (generators, slots) = mine._cases[place]
        rng = np.random.default_rng([mine._seed, number])
        return _one(case, generators, slots, rng, possible=mine._possible)


def _cases(file: Path | None, quick: bool) -> list[tuple[Case, tuple[int, int]]]:
    if file is not None:
        mine = np.array([int(line) for line in file.read_text().split()])
        own = Case(file.name, "symmetric", drawn=lambda count, rng: rng.choice(mine, count))
        return [(own, shape) for shape in SHAPES]
    table = [Case(lengths, errors) for errors in TABLE_ERRORS for lengths in TABLE_LENGTHS]
    if quick:
        return [(case, shape) for case in table for shape in QUICK] + [(case, (8, 64)) for case in MORE]
    paper = Case("paper", "symmetric")
    few_slots = [(paper, shape) for shape in SHAPES if shape not in SIX]
    return [(case, shape) for case in (*table, *MORE) for shape in SIX] + few_slots


def _draw(file: Path, rng: np.random.Generator) -> None:
    traces: dict[str, list[Span]] = {}
    _one(Case("paper", "symmetric"), 8, 256, rng, traces)
    wanted = ("fifo", "longest_first", "algorithm2", "ours", "ours_oracle")
    shown = {name.replace("_", " "): traces[name] for name in wanted}
    draw_gantt(shown, f"{SAMPLES} samples on 8 generators of 256 slots", file)


def _one(
    case: Case,
    generators: int,
    slots: int,
    rng: np.random.Generator,
    traces: dict[str, list[Span]] | None = None,
    *,
    possible: bool = False,
) -> dict[str, float]:
    """All policies on one draw."""
    tables = case.tables(generators, slots)
    now, before = case.draw(rng)
    seed = int(rng.integers(1 << 30))
    noisy, oracle = _jobs(now, now.predicted), _jobs(now, now.true.astype(float))
    lengths = {job.key: int(length) for job, length in zip(noisy, now.true, strict=True)}

    policies: dict[str, tuple[Sequence[SampleJob], Policy]] = {
        "fifo": (noisy, RandomFifo(seed)),
        "round_robin": (noisy, RoundRobin()),
        "longest_first": (noisy, LongestFirst()),
        "algorithm2": (noisy, Algorithm2()),
        "algorithm2_oracle": (oracle, Algorithm2()),
        "ours": (noisy, production(learned_of(before), seed)),
        "ours_oracle": (oracle, production(learned_of(before, exact=True), seed)),
    }
    if case.size > 1:
        policies["longest_first_corrected"] = noisy, LongestFirst(learned_of(before))
    found = {"bound": bound(now.true.tolist(), tables)}
    for name, (jobs, policy) in policies.items():
        trace: list[Span] = []
        found[name] = generate(jobs, lengths, tables, policy, trace)
        if traces is not None:
            traces[name] = trace
    found.setdefault("longest_first_corrected", found["longest_first"])
    if possible:
        from tests.bench._possible import possible as reachable

        found["possible"] = reachable(learned_of(before).beliefs.quantiles(now.predicted), tables)
    return {name: value / found["fifo"] for name, value in found.items()}


def _jobs(workload: Workload, predicted: np.ndarray) -> list[SampleJob]:
    """As the feeder's planner makes them: single samples as for an evaluation, groups as for an iteration."""
    first = np.unique(workload.group, return_index=True)[1]
    problems = [{"id": str(group), "prompt": ""} for group in range(len(first))]
    size = len(workload.group) // len(first)
    spec = spec_of(algorithm={"groups": len(first), "group_size": max(2, size)}, task={"shuffle": False})
    told = {
        question_of(problem["id"], None, []).key: float(length)
        for problem, length in zip(problems, predicted[first], strict=True)
    }
    planner = Planner("bench", spec, problems, lambda text: [])
    if size == 1:
        prompts = planner.evaluate(0, problems, ToldLengths(told))
        return [SampleJob(prompt, 0) for prompt in prompts]
    prompts = sorted(planner.admit(lambda version: ToldLengths(told)), key=lambda prompt: prompt.group)
    jobs = [SampleJob(prompt, index) for prompt in prompts for index in range(prompt.size)]
    return [  # who knows all knows more than a ranker could say of a prompt
        job
        if job.prompt.predicted == length
        else replace(job, prompt=structs.replace(job.prompt, predicted=float(length)))
        for job, length in zip(jobs, predicted, strict=True)
    ]


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = Table(title=f"seconds to generate {SAMPLES} samples; random FIFO = 1")
    for column in ("case", "lengths", "generators", "slots", *COLUMNS):
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            row["case"], row["lengths"], str(row["generators"]), str(row["slots"]),
            *(f"{row[c]:.3f}" for c in COLUMNS),
        )  # fmt: skip
    console = Console(width=170)
    console.print(table)
    console.print(_summary(rows))
    known = [row for row in rows if row["case"] in TABLE_ERRORS[:2]]
    grouped = [row for row in rows if "group" in row["case"]]
    found: dict[str, float] = {}
    for which, mine in (("", known), ("groups_", grouped)):
        for name in [name for name in ("ours", "possible") if mine and name in mine[0]]:
            found[f"{which}{name}_gain"] = float(np.mean([1 - row[name] / _simple(row) for row in mine]))
    over = [row["ours_oracle"] / row["bound"] for row in known]
    if over:
        found |= {"oracle_over_bound": float(np.mean(over)), "oracle_over_bound_worst": max(over)}
    cells = _cells(rows)
    found["cell_worst"] = max((mean for mean, _ in cells.values()), default=0.0)
    found["ours_over_simple_worst"] = max((worst for _, worst in cells.values()), default=0.0)
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    return {"rows": rounded, **{name: round(value, 4) for name, value in found.items()}}


def _cells(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """By case and lengths: ours over the best simple policy, the mean of all shapes and the worst shape."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["case"], row["lengths"]), []).append(row["ours"] / _simple(row))
    return {cell: (float(np.mean(ratios)), max(ratios)) for cell, ratios in found.items()}


def _summary(rows: list[dict[str, Any]]) -> Table:
    cells = _cells(rows)
    lengths = list(dict.fromkeys(row["lengths"] for row in rows))
    table = Table("errors", *lengths, title="ours over the best simple policy: mean of the shapes (worst)")
    for case in dict.fromkeys(row["case"] for row in rows):
        shown = (cells.get((case, one)) for one in lengths)
        table.add_row(case, *("" if one is None else f"{one[0]:.3f} ({one[1]:.2f})" for one in shown))
    return table


def _simple(row: dict[str, Any]) -> float:
    """The best simple policy of a row's mean."""
    return float(min(row[policy] for policy in SIMPLE))
