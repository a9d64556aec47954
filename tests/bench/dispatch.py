"""Generation time of one iteration by dispatch policy, on replayed lengths, in units of random FIFO.

1,024 samples of the paper's length histogram (section 4.2's latency curve), all waiting at the start;
the ranker errs log-normally (sigma 0.25), or knows (oracle). What it is worth is measured on 4,096
samples before, as a run would have them. The real dispatcher gives them to `ReplayEngine`s in virtual time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from producers.dispatch.algorithm2 import Algorithm2
from producers.dispatch.beliefs import KEPT, Beliefs
from producers.dispatch.deadline import DeadlinePolicy
from producers.dispatch.policies import LongestFirst, Policy, RandomFifo, RoundRobin
from producers.jobs import Job
from schemas.messages import TRAIN, Prompt
from tests.bench._gantt import draw as draw_gantt
from tests.bench._lengths import CURVE, bound, paper_lengths
from tests.bench._virtual import PREFILL_S, Span, generate

SAMPLES, SIGMA, REPLANS = 1024, 0.25, 8
SHAPES = [(instances, slots) for instances in (4, 8, 16) for slots in (32, 64, 256)]
COLUMNS = (
    "fifo", "round_robin", "longest_first", "algorithm2", "algorithm2_oracle", "ours_static", "ours",
    "ours_oracle", "bound",
)  # fmt: skip

Draw = Callable[[int, np.random.Generator], np.ndarray]


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench dispatch")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--draws", type=int, default=5 if quick else 20)
    parser.add_argument("--lengths", type=Path, help="a file with lengths of your own, one a line")
    parser.add_argument("--draw", type=Path, help="draw one iteration by policy (8 x 256) into this file")
    given = parser.parse_args(argv)
    if given.draw:
        _draw(given.draw, np.random.default_rng(given.seed))
    rows = []
    cases = [(name, draw, shape) for name, draw in _sources(given.lengths, quick) for shape in SHAPES]
    for name, draw, (instances, slots) in track(cases, "dispatch", console=Console(stderr=True)):
        measured = [
            _one(draw, instances, slots, np.random.default_rng([given.seed, number]))
            for number in range(given.draws)
        ]
        means = {column: float(np.mean([one[column] for one in measured])) for column in COLUMNS}
        rows.append({"lengths": name, "instances": instances, "slots": slots, **means})
    return _report(rows)


def _sources(file: Path | None, quick: bool) -> list[tuple[str, Draw]]:
    if file is not None:
        own = np.array([int(line) for line in file.read_text().split()])
        return [(file.name, lambda count, rng: rng.choice(own, count))]
    return [
        (f"{longest // 1000}K", lambda count, rng, longest=longest: paper_lengths(count, longest, rng))
        for longest in ((20_000,) if quick else (20_000, 10_000, 5_000))
    ]


def _draw(file: Path, rng: np.random.Generator) -> None:
    traces: dict[str, list[Span]] = {}
    _one(lambda count, rng: paper_lengths(count, 20_000, rng), 8, 256, rng, traces)
    wanted = ("fifo", "longest_first", "algorithm2", "ours", "ours_oracle")
    shown = {name.replace("_", " "): traces[name] for name in wanted}
    draw_gantt(shown, f"{SAMPLES} samples on 8 instances of 256 slots", file)


def _one(
    draw: Draw,
    instances: int,
    slots: int,
    rng: np.random.Generator,
    traces: dict[str, list[Span]] | None = None,
) -> dict[str, float]:
    """All policies on one draw."""
    tables = [CURVE.table(slots)] * instances
    true = draw(SAMPLES + KEPT, rng)
    guessed = true * np.exp(rng.normal(0, SIGMA, len(true)))
    longest = int(true.max())
    lengths = {(group, 0): int(length) for group, length in enumerate(true[:SAMPLES])}
    noisy, oracle = [_jobs(predicted[:SAMPLES]) for predicted in (guessed, true.astype(float))]
    seed = int(rng.integers(1 << 30))

    def ours(predicted: np.ndarray, **options: Any) -> DeadlinePolicy:
        beliefs = Beliefs(longest)
        beliefs.observe(zip(predicted[SAMPLES:], true[SAMPLES:], strict=True))
        return DeadlinePolicy(beliefs, seed=seed, **options)

    policies: dict[str, tuple[Sequence[Job], Policy]] = {
        "fifo": (noisy, RandomFifo(seed)),
        "round_robin": (noisy, RoundRobin()),
        "longest_first": (noisy, LongestFirst()),
        "algorithm2": (noisy, Algorithm2()),
        "algorithm2_oracle": (oracle, Algorithm2()),
        "ours_static": (noisy, ours(guessed)),
        "ours": (noisy, ours(guessed, replans=REPLANS, move_s=PREFILL_S)),
        "ours_oracle": (oracle, ours(true)),
    }
    found = {"bound": bound(true[:SAMPLES].tolist(), tables)}
    for name, (jobs, policy) in policies.items():
        trace: list[Span] = []
        found[name] = generate(jobs, lengths, tables, policy, trace)
        if traces is not None:
            traces[name] = trace
    return {name: value / found["fifo"] for name, value in found.items()}


def _jobs(predicted: np.ndarray) -> list[Job]:
    """Independent samples: groups of one."""
    return [
        Job(
            Prompt(
                run="bench", purpose=TRAIN, group=group, size=1, problem_id=str(group), problem="{}", epoch=0,
                tokens=np.zeros(1, np.int32), window=0, mini=0, bundle=group, bundle_groups=1, min_version=0,
                predicted=float(length), predictor="bench", length_class=0, edges=[], admitted_at=0.0,
            ),
            0,
        )
        for group, length in enumerate(predicted)
    ]  # fmt: skip


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = Table(title=f"seconds to generate {SAMPLES} samples; random FIFO = 1")
    for column in ("lengths", "instances", "slots", *COLUMNS):
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            row["lengths"], str(row["instances"]), str(row["slots"]), *(f"{row[c]:.3f}" for c in COLUMNS)
        )
    Console(width=150).print(table)
    simple = [min(row["round_robin"], row["longest_first"]) for row in rows]
    gains = {
        f"{name}_gain": float(np.mean([1 - row[name] / best for row, best in zip(rows, simple, strict=True)]))
        for name in ("ours_static", "ours")
    }
    over = [row["ours_oracle"] / row["bound"] for row in rows]
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    gains |= {"oracle_over_bound": float(np.mean(over)), "oracle_over_bound_worst": max(over)}
    return {"rows": rounded, **{name: round(value, 4) for name, value in gains.items()}}
