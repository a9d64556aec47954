"""Samples a second of one run file in two placements, in turn: engine and learner side by side, or in turns.

    apart      disaggregated, one thread each: the usual way on a machine of two cores
    in turns   colocated, all cores each: while one side computes, the other one rests
    fighting   disaggregated, all cores each: what turns are for

Only the placement section and the numbers of threads change. A round has all of them, in sync and in async
mode; a ratio is taken within a round, and each figure is the median of the rounds. Rates are those of the
iterations after the first few, by the times in the ledger. `trainer` and `generator` are the shares of that
time in which each side worked, by the causes of their heartbeats.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from infra.bus import read_all
from infra.choices import cores
from infra.roles.turns import OTHERS_TURN
from infra.stack import local
from schemas.messages import WAIT, Heartbeat, StepRecord
from schemas.topics import Topics
from schemas.wire import decode
from tests.bench._runs import RUNFILE, bus_of, finish, own_stack, start

WARM = 4  # iterations that are not counted
_MODES = {
    "sync": ("algorithm.mode=sync", "algorithm.staleness=0"),
    "async": ("algorithm.mode=async", "algorithm.staleness=1"),
}
_SHARES = ("generator", "trainer")


@dataclass
class Rate:
    """A run's counted iterations."""

    samples_per_s: float
    worked: dict[str, float]  # share of the time, by role
    turns: float  # share of the generator's time in which it waited for its turn


def placements() -> dict[str, tuple[str, ...]]:
    """The settings of each way."""
    every = f"generator.threads={cores()}", f"trainer.threads={cores()}"
    return {
        "apart": (),
        "in_turns": ("placement.kind=colocated", *every),
        "fighting": every,
    }


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench placement")
    parser.add_argument("--iterations", type=int, default=14 if quick else 30)
    parser.add_argument("--rounds", type=int, default=2 if quick else 4)
    parser.add_argument("--runfile", default=str(RUNFILE))
    parser.add_argument("--set", action="append", default=[], help="further settings of all runs, as A.B=C")
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES))
    parser.add_argument("--ways", nargs="+", choices=placements(), default=list(placements()))
    given = parser.parse_args(argv)
    console = Console(stderr=True)
    changes = [f"algorithm.iterations={given.iterations}", "evaluation.problems=0", *given.set]
    rounds: list[dict[str, Rate]] = []
    with own_stack() as stack, tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
        for number in range(given.rounds):
            found = {}
            for mode, name in itertools.product(given.modes, given.ways):
                settings, placement = _MODES[mode], placements()[name]
                console.print(f"round {number + 1} of {given.rounds}: {mode}, {name} …")
                overrides = [*changes, f"report={folder}/runs", *settings, *placement]
                rate = found[f"{mode}_{name}"] = _measured(given.runfile, overrides, stack)
                console.print(f"  {rate.samples_per_s:.1f} samples/s")
            rounds.append(found)
    return _report(rounds)


def _measured(runfile: str, overrides: Sequence[str], stack: local.Stack) -> Rate:
    run = finish(start(runfile, overrides, stack), stack)
    bus, topics = bus_of(stack), Topics(run.id, run.spec.lengths.classes)
    steps = [decode(r.value, StepRecord) for r in read_all(bus, topics.ledger, deadline_s=60)]
    beats = [decode(r.value, Heartbeat) for r in read_all(bus, topics.status, deadline_s=60)]
    bus.close()
    begin = max(step.finished_at for step in steps if step.iteration < WARM)
    counted = [step for step in steps if step.iteration >= WARM]
    end = counted[-1].finished_at
    spent = {role: _causes(beats, role, begin, end) for role in _SHARES}
    return Rate(
        sum(len(step.rewards) for step in counted) / (end - begin),
        {
            role: 1 - sum(share for name, share in causes.items() if name.startswith(WAIT))
            for role, causes in spent.items()
        },
        spent["generator"].get(WAIT + OTHERS_TURN, 0.0),
    )


def _causes(beats: Sequence[Heartbeat], role: str, begin: float, end: float) -> dict[str, float]:
    """Shares of a process's time by cause between two moments."""
    mine = [beat for beat in beats if beat.role == role and begin <= beat.sent_at <= end]
    if len(mine) < 2:
        return {}
    first, last = mine[0], mine[-1]
    whole = sum(last.causes.values()) - sum(first.causes.values())
    return {name: (last.causes[name] - first.causes.get(name, 0.0)) / whole for name in last.causes}


def _report(rounds: Sequence[dict[str, Rate]]) -> dict[str, float]:
    table = Table(title=f"samples of the counting task on {cores()} cores, medians of {len(rounds)} rounds")
    for column in ("", "samples/s", "of apart", "generator works", "waits for its turn", "trainer works"):
        table.add_column(column, justify="left" if not column else "right")
    figures: dict[str, float] = {}
    for name in rounds[0]:
        mode = name.partition("_")[0]
        rate = float(np.median([one[name].samples_per_s for one in rounds]))
        first = f"{mode}_apart" if f"{mode}_apart" in rounds[0] else name
        ratios = [one[name].samples_per_s / one[first].samples_per_s for one in rounds]
        worked = {role: float(np.median([one[name].worked[role] for one in rounds])) for role in _SHARES}
        figures[f"{name}_samples_per_s"] = rate
        if name != first:
            figures[f"{name}_over_apart"] = float(np.median(ratios))
            figures[f"{name}_over_apart_least"], figures[f"{name}_over_apart_most"] = min(ratios), max(ratios)
        turns = float(np.median([one[name].turns for one in rounds]))
        table.add_row(
            name.replace("_", " "), f"{rate:.0f}", f"{np.median(ratios):.2f}", f"{worked['generator']:.0%}",
            f"{turns:.0%}", f"{worked['trainer']:.0%}",
        )  # fmt: skip
    Console(width=120).print(table)
    return {name: round(value, 4) for name, value in figures.items()}
