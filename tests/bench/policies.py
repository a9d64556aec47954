"""The demo task on two real generators, dispatched by our policy and by the simple ones, in turn.

In sync mode a run makes the same samples whoever makes them, so iterations are compared one by one: seconds
from admission to the last finished sample. Both generators and the trainer share this machine; while one
generates, the trainer mostly waits.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from infra.stack import local
from schemas.messages import TRAIN, Sample
from schemas.topics import Topics
from tests.bench._runs import RUNFILE, bus_of, finish, own_stack, samples_of, start

WARM = 4  # iterations that are not counted: nobody knows lengths yet


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench policies")
    parser.add_argument("--iterations", type=int, default=12 if quick else 30)
    parser.add_argument("--rounds", type=int, default=1 if quick else 3, help="runs of each policy, in turn")
    parser.add_argument("--slots", type=int, default=128, help="of each generator")
    parser.add_argument("--policies", nargs="+", default=["deadline", "round_robin"])
    parser.add_argument("--runfile", default=str(RUNFILE))
    given = parser.parse_args(argv)
    changes = [
        f"algorithm.iterations={given.iterations}", "evaluation.problems=0", "algorithm.mode=sync",
        "algorithm.staleness=0", "placement.generators=2", f"generator.slots={given.slots}",
    ]  # fmt: skip
    console, made = Console(stderr=True), set()
    seconds: dict[str, list[dict[int, float]]] = {policy: [] for policy in given.policies}
    with own_stack() as stack, tempfile.TemporaryDirectory(prefix="streamrl-bench-") as reports:
        for number in range(given.rounds):
            for policy in given.policies:
                console.print(f"round {number + 1} of {given.rounds}: {policy} …")
                overrides = [*changes, f"dispatch.policy={policy}", f"report={reports}"]
                took, tokens = _generation(given.runfile, overrides, stack)
                seconds[policy].append(took)
                made.add(tokens)
    if len(made) > 1:
        raise RuntimeError("the policies' runs did not make the same samples: nothing can be compared")
    common = set.intersection(*(set(took) for rounds in seconds.values() for took in rounds))
    if not common:
        raise RuntimeError("in no iteration did both generators make samples in all runs: give it more")
    ordered = sorted(common)
    return _report({p: np.array([[t[n] for n in ordered] for t in took]) for p, took in seconds.items()})


def _generation(runfile: str, overrides: Sequence[str], stack: local.Stack) -> tuple[dict[int, float], bytes]:
    """Seconds of each iteration that both generators worked on, and all tokens that were made."""
    run = finish(start(runfile, overrides, stack), stack)
    bus = bus_of(stack)
    samples = samples_of(bus, Topics(run.id, run.spec.lengths.classes))
    bus.close()
    iterations: dict[int, list[Sample]] = {}
    for sample in samples.values():
        if sample.purpose == TRAIN and sample.iteration >= WARM:
            iterations.setdefault(sample.iteration, []).append(sample)
    took = {
        iteration: max(s.finished_at for s in mine) - min(s.admitted_at for s in mine)
        for iteration, mine in iterations.items()
        if len({sample.generator for sample in mine}) == 2
    }
    return took, b"".join(samples[key].tokens.tobytes() for key in sorted(samples))


def _report(seconds: dict[str, np.ndarray]) -> dict[str, Any]:
    base = next(iter(seconds.values()))
    table = Table(title="seconds to generate an iteration, two generators")
    for column in ("policy", "mean", "median", "slowest", "the first's over it, by iteration", "rounds"):
        table.add_column(column)
    rows = []
    for policy, took in seconds.items():
        ratios = np.median(base, axis=0) / np.median(took, axis=0)  # of each iteration, over the rounds
        row = {
            "policy": policy, "mean_s": float(took.mean()), "median_s": float(np.median(took)),
            "slowest_s": float(took.max()), "ours_over_it": float(np.exp(np.mean(np.log(ratios)))),
            "iterations": int(took.size),
        }  # fmt: skip
        rows.append(row)
        table.add_row(
            policy, f"{row['mean_s']:.2f}", f"{row['median_s']:.2f}", f"{row['slowest_s']:.2f}",
            f"{row['ours_over_it']:.3f}", str(len(took)),
        )  # fmt: skip
    Console(width=120).print(table)
    return {"rows": [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]}
