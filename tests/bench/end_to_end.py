"""Ours async, ours sync and a bare in-process loop on the same model, task, batch and seed, in one run.

Machines change their speed within minutes, so all are measured in turn, several rounds of them: a ratio is
taken within a round, and each figure is the median of the rounds. The table shows the last round.

    limit = samples / max(seconds to generate them, seconds to train them), each alone on one core,
            measured on the very samples of the async run, generation within the same staleness bound:
            an iteration's longest sample takes its time, and only so many iterations may be under way.
            Without that bound (which no run of the algorithm may break) it is printed beside it.

Ours runs whole: broker, Prefect server, flow, feeder, generator, trainer, reward process. Rates are those of
the iterations after the first few, by the times in the ledger: start-up is in nobody's figure.
`cpu_share`: the part of this machine's cores that a role kept busy meanwhile. Weights are in no process of
their own: trainer and generator count their threads for them (`weights_cpu_s`). `overhead`: broker, feeder,
weights, and all that supervises (Prefect, flow, guard).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from flows.run.commands import allocator
from infra.bus import read_all
from infra.choices import cores
from infra.runs import RunRecord
from infra.stack import local
from schemas.messages import Heartbeat, Sample, StepRecord
from schemas.topics import Topics
from schemas.wire import decode, encode
from tests.bench._cpu import CpuWatch
from tests.bench._own_process import result_of
from tests.bench._runs import RUNFILE, bus_of, finish, own_stack, samples_of, start

WARM = 12  # iterations that are not counted: until then the broker compiles itself, which a long run forgets
_OVERHEAD = ("kafka", "feeder", "weights", "prefect", "flow", "guard")


@dataclass
class Ours:
    """What a run of ours did in its counted iterations."""

    seconds: float
    samples: int
    tokens: int
    trainer_idle: float
    generator_idle: float
    cpu: dict[str, float]
    iterations: list[list[Sample]]

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench end_to_end")
    parser.add_argument("--iterations", type=int, default=24 if quick else 44)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of all that is measured (default: %(default)s)"
    )
    parser.add_argument("--runfile", default=str(RUNFILE))
    given = parser.parse_args(argv)
    console = Console(stderr=True)
    changes = [f"algorithm.iterations={given.iterations}", "evaluation.problems=0"]
    rounds = []
    for number in range(given.rounds):
        console.print(f"round {number + 1} of {given.rounds}")
        with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder:
            rounds.append(_round(given.runfile, changes, Path(folder), console))
    return {name: float(np.round(np.median([one[name] for one in rounds]), 4)) for name in rounds[0]}


def _round(runfile: str, changes: list[str], folder: Path, console: Console) -> dict[str, float]:
    results = {}
    for mode in ("async", "sync"):
        console.print(f"  ours, {mode} …")
        overrides = [*changes, f"report={folder}/runs", f"algorithm.mode={mode}"]
        if mode == "sync":
            overrides.append("algorithm.staleness=0")
        with own_stack() as stack:
            results[mode], record = _ours(runfile, overrides, stack)
            model = str(Path(record.model).resolve())  # the stack's folder goes, the models stay
        if mode == "async":  # between the two, so that both stand beside what they are compared with
            console.print("  the bare loop; generation alone, training alone …")
            found = _references(runfile, changes, model, results["async"].iterations, folder)
    return _report(results, found["bare"], found["limit"])


def _ours(runfile: str, overrides: Sequence[str], stack: local.Stack) -> tuple[Ours, RunRecord]:
    states = local.stack_state(paths=stack.paths)
    flow = start(runfile, overrides, stack)
    watch = CpuWatch(flow, {state.name: psutil.Process(state.pid) for state in states if state.pid})
    run = finish(flow, stack)
    watch.close()
    bus, topics = bus_of(stack), Topics(run.id, run.spec.lengths.classes)
    steps = [decode(r.value, StepRecord) for r in read_all(bus, topics.ledger, deadline_s=60)]
    warm = [step.finished_at for step in steps if step.iteration < WARM]
    counted = [step for step in steps if step.iteration >= WARM]
    begin, end = warm[-1], steps[-1].finished_at
    beats = [decode(r.value, Heartbeat) for r in read_all(bus, topics.status, deadline_s=60)]
    samples = samples_of(bus, topics)
    iterations: dict[int, list[Sample]] = {}
    for step in counted:
        for group, index in zip(step.groups.tolist(), step.indexes.tolist(), strict=True):
            iterations.setdefault(step.iteration, []).append(samples[group, index])
    bus.close()
    ours = Ours(
        seconds=end - begin,
        samples=sum(len(step.rewards) for step in counted),
        tokens=sum(int(step.lengths.sum()) for step in counted),
        trainer_idle=sum(step.metrics["waited_s"] for step in counted) / (end - begin),
        generator_idle=1 - _rate(beats, "generator", "busy_s", begin, end),
        cpu=_by_role(watch.between(begin, end), beats, begin, end),
        iterations=list(iterations.values()),
    )
    return ours, run


def _by_role(cpu: dict[str, float], beats: Sequence[Heartbeat], begin: float, end: float) -> dict[str, float]:
    """CPU seconds; those for weights are taken out of the processes in which they were spent."""
    found = {**cpu, "weights": 0.0}
    for role in ("trainer", "generator"):
        spent = _rate(beats, role, "weights_cpu_s", begin, end) * (end - begin)
        found[role] -= spent
        found["weights"] += spent
    return found


def _rate(beats: Sequence[Heartbeat], role: str, counter: str, begin: float, end: float) -> float:
    """Growth of a counter per second between two moments."""
    mine = [b for b in beats if b.role == role and begin <= b.sent_at <= end and counter in b.counters]
    if len(mine) < 2:
        return float("nan")
    return (mine[-1].counters[counter] - mine[0].counters[counter]) / (mine[-1].sent_at - mine[0].sent_at)


def _references(
    runfile: str, changes: list[str], model: str, iterations: list[list[Sample]], folder: Path
) -> dict[str, dict[str, float]]:
    """The bare loop and the limits, in one process of their own with nothing else running."""
    for number, samples in enumerate(iterations):
        for place, sample in enumerate(samples):
            file = folder / "limit" / f"{number:04d}" / f"{place:04d}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode(sample))
    arguments = [runfile, model, str(folder / "limit"), str(WARM), *changes]
    return dict(result_of("_references", *arguments, env=allocator()))


def _report(ours: dict[str, Ours], bare: dict[str, float], limit: dict[str, float]) -> dict[str, float]:
    fast, on_policy = ours["async"], ours["sync"]
    limit_rate = fast.samples / max(limit["generate_s"], limit["train_s"])
    free_rate = fast.samples / max(limit["unbounded_s"], limit["train_s"])
    bare_rate = bare["samples"] / bare["seconds"]
    table = Table(title="samples of the counting task, one machine")
    for column in (
        "",
        "samples/s",
        "trained tokens/s",
        "tokens/sample",
        "trainer idle",
        "generator idle",
        "CPU seconds",
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, run in (("ours, async", fast), ("ours, sync", on_policy)):
        table.add_row(
            name, f"{run.rate:.0f}", f"{run.tokens / run.seconds:.0f}", f"{run.tokens / run.samples:.1f}",
            f"{run.trainer_idle:.1%}", f"{run.generator_idle:.1%}",
            ", ".join(f"{role} {seconds:.1f}" for role, seconds in run.cpu.items()),
        )  # fmt: skip
    table.add_row(
        "bare loop", f"{bare_rate:.0f}", f"{bare['tokens'] / bare['seconds']:.0f}",
        f"{bare['tokens'] / bare['samples']:.1f}", f"{bare['generate_s'] / bare['seconds']:.1%}",
        f"{bare['train_s'] / bare['seconds']:.1%}", f"{bare['cpu_s']:.1f}",
    )  # fmt: skip
    table.add_row("limit of overlap", f"{limit_rate:.0f}", "", "", "", "",
                  f"generate {limit['generate_s']:.1f}, train {limit['train_s']:.1f}")  # fmt: skip
    table.add_row("the same, were staleness not bounded", f"{free_rate:.0f}", "", "", "", "",
                  f"generate {limit['unbounded_s']:.1f}")  # fmt: skip
    Console(width=150).print(table)
    figures = {
        "async_samples_per_s": fast.rate,
        "sync_samples_per_s": on_policy.rate,
        "bare_samples_per_s": bare_rate,
        "limit_samples_per_s": limit_rate,
        "unbounded_limit_samples_per_s": free_rate,
        "async_over_limit": fast.rate / limit_rate,
        "async_over_bare": fast.rate / bare_rate,
        "sync_over_bare": on_policy.rate / bare_rate,
        "async_tokens_per_sample": fast.tokens / fast.samples,
        "bare_tokens_per_sample": bare["tokens"] / bare["samples"],
    }
    for mode, run in (("async", fast), ("sync", on_policy)):
        for role, seconds in run.cpu.items():
            figures[f"{mode}_cpu_share_{role}"] = seconds / (run.seconds * cores())
        figures[f"{mode}_cpu_share_overhead"] = sum(
            figures[f"{mode}_cpu_share_{role}"] for role in _OVERHEAD if role in run.cpu
        )
    return figures
