"""Does it learn the same when it learns faster? Held-out reward against seconds, on the demo.

Sync, async at staleness 1, 2 and 4, in order window and in order arrival, and a bare in-process loop, each
with several seeds: the same model, task, batch and number of iterations. `--task paying` takes a task in
which longer answers earn more (`_paying_task.py`). Ours runs whole (broker, Prefect, flow, feeder, generator,
trainer); seconds count from the first prompt, and both measure the same held-out problems on the way.
trained_over_generated_length and length_distance say whether lengths were lost on the way to the trainer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from flows.run.commands import allocator
from flows.view.held_out_results import known_lengths, longest
from infra.bus import read_all
from infra.runs import RunRecord
from infra.stack import local
from producers.tasks import Problem, load_problems
from schemas.messages import Evaluation, StepRecord
from schemas.topics import Topics
from schemas.wire import decode
from tests.bench._own_process import result_of
from tests.bench._runs import RUNFILE, bus_of, finish, own_stack, samples_of, start

SYNC = ("algorithm.mode=sync", "algorithm.staleness=0")
MODES: dict[str, tuple[str, ...]] = {
    "sync": SYNC,
    **{f"async {k}": ("algorithm.mode=async", f"algorithm.staleness={k}") for k in (1, 2, 4)},
    **{
        f"arrival {k}": ("algorithm.mode=async", f"algorithm.staleness={k}", "algorithm.order=arrival")
        for k in (1, 2, 4)
    },
}
BARE = "bare"
TASKS = {"demo": (), "paying": (f"task.python={Path(__file__).with_name('_paying_task.py')}",)}

Point = dict[str, float]


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench learning")
    parser.add_argument("--task", choices=list(TASKS), default="demo")
    parser.add_argument("--modes", nargs="+", choices=[*MODES, BARE], default=[*MODES, BARE], metavar="MODE")
    parser.add_argument("--seeds", type=int, default=1 if quick else 3)
    parser.add_argument("--iterations", type=int, default=12 if quick else 40)
    parser.add_argument("--every", type=int, default=6 if quick else 8, help="iterations between evaluations")
    parser.add_argument("--draw", type=Path, help="draw the curves into this file")
    parser.add_argument("--set", action="append", default=[], help="another setting of the run file, a.b=c")
    given = parser.parse_args(argv)
    if given.modes == [BARE]:
        parser.error("bare needs another mode beside it: that one's run builds the model")
    console, curves = Console(stderr=True), []
    common = [f"algorithm.iterations={given.iterations}", f"evaluation.every={given.every}"]
    common += [*TASKS[given.task], *given.set]
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as folder, own_stack() as stack:
        for seed in range(1, given.seeds + 1):
            model = ""
            for name, changes in MODES.items():
                if name not in given.modes:
                    continue
                console.print(f"{name}, seed {seed} …")
                overrides = [*common, *changes, f"seed={seed}", f"report={folder}/runs"]
                record = finish(start(str(RUNFILE), overrides, stack), stack)
                model = record.model
                curves.append(_curve(record, stack, name))
            if BARE in given.modes:
                console.print(f"bare loop, seed {seed} …")
                curves.append(_bare([*common, *SYNC, f"seed={seed}"], model, given.every, seed))
    if given.draw:
        _draw(curves, given.draw)
    _print(curves)
    return {"curves": curves}


def point(version: int, seconds: float, rewards: Mapping[str, float], problems: Sequence[Problem]) -> Point:
    """What a version earned on held-out problems."""
    hard = longest(sorted(rewards), known_lengths(problems))
    return {
        "version": version,
        "seconds": round(seconds, 2),
        "reward": round(float(np.nanmean(list(rewards.values()))), 4),
        "reward_longest_fifth": round(float(np.nanmean([rewards[name] for name in hard])), 4),
    }


def _curve(record: RunRecord, stack: local.Stack, name: str) -> dict[str, Any]:
    """What a run left on its log."""
    bus, topics = bus_of(stack), Topics(record.id, record.spec.lengths.classes)
    steps = [decode(r.value, StepRecord) for r in read_all(bus, topics.ledger, deadline_s=60)]
    found = [decode(r.value, Evaluation) for r in read_all(bus, topics.evals, deadline_s=60)]
    samples = samples_of(bus, topics)
    bus.close()
    problems = load_problems(record.spec, record.spec.task.held_out_split)
    began = min(sample.admitted_at for sample in samples.values())
    points = []
    for one in sorted(found, key=lambda one: one.version):
        rewards = dict(zip(one.problem_ids, one.rewards.tolist(), strict=True))
        points.append(point(one.version, one.finished_at - began, rewards, problems))
    trained = np.concatenate([step.lengths for step in steps])
    generated = [sample.true_length for sample in samples.values() if sample.purpose == "train"]
    mode, _, k = name.partition(" ")
    return {
        "mode": mode, "k": int(k or 0), "seed": record.spec.seed,
        **{key: points[-1][key] for key in ("reward", "reward_longest_fifth", "seconds")},
        "trained_over_generated_length": round(float(trained.mean() / np.mean(generated)), 4),
        "length_distance": round(_distance(trained, np.array(generated)), 4),
        "points": points,
    }  # fmt: skip


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference between two distributions' shares of samples up to some length."""
    at = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(lengths), at, side="right") / lengths.size for lengths in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def _bare(changes: Sequence[str], model: str, every: int, seed: int) -> dict[str, Any]:
    """In a process of its own, with nothing else running but the idle stack."""
    points: list[Point] = result_of("_bare_curve", str(RUNFILE), model, str(every), *changes, env=allocator())
    last = {key: points[-1][key] for key in ("reward", "reward_longest_fifth", "seconds")}
    return {
        "mode": "bare", "k": 0, "seed": seed, **last, "trained_over_generated_length": 1.0,
        "length_distance": 0.0, "points": points,
    }  # fmt: skip


def _print(curves: Sequence[dict[str, Any]]) -> None:
    table = Table(title="held-out reward of the counting task, by seed")
    columns = (
        "mode",
        "k",
        "seed",
        "reward",
        "reward_longest_fifth",
        "seconds",
        "trained_over_generated_length",
    )
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for curve in curves:
        table.add_row(*(str(curve[column]) for column in columns))
    Console(width=130, stderr=True).print(table)


def _draw(curves: Sequence[dict[str, Any]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    names = dict.fromkeys((curve["mode"], curve["k"]) for curve in curves)
    for number, (mode, k) in enumerate(names):
        label = f"{mode}, k = {k}" if k else mode
        for curve in (c for c in curves if (c["mode"], c["k"]) == (mode, k)):
            for place, key in enumerate(("reward", "reward_longest_fifth")):
                line = [(p["seconds"], p[key]) for p in curve["points"]]
                axes[place].plot(*zip(*line, strict=True), color=f"C{number}", alpha=0.8, label=label)
            label = None
    for place, title in enumerate(("held-out reward", "of the longest fifth")):
        axes[place].set_title(title)
        axes[place].set_xlabel("seconds")
        axes[place].grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
