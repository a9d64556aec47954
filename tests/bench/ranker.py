"""How well the length ranker ranks, on unseen prompts and on prompts that come again, and what it costs.

Recall of the longest 20, 10 and 5 % of groups (by their mean length) and Kendall's tau, beside the same of

- one who knows each prompt's true mean: no ranker can be better than that;
- ridge regression over bags of words, which a ranker has to beat;
- the ranker's network alone, without the additive term.

The StreamRL paper's ranker, a language model of 7B parameters, has recalls of .87, .82 and .76.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from producers.ranker.offline import Quality, judged, recorded, split, tau, train_ranker
from producers.ranker.ranker import Answered, NoBackbone, Ranker, score_of
from tests.bench._functions import functions
from tests.bench._prompts import SHAPES, Asked, count, drift, errands, errands_among_filler, filler
from tests.bench._ranker_cost import backbone_cost, many_at_once, window_cost
from tests.bench._ridge import ridge

_WINDOW = 64
_JUDGED = 1024  # groups to judge by
_FILLER_TRAIN = 2048  # groups to learn from where most words are filler


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench ranker")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--draws", type=int, default=1 if quick else 3)
    parser.add_argument("--train", type=int, default=4096, help="groups to learn from")
    parser.add_argument("--run", help="also what a run of the local store recorded, such as count-1")
    given = parser.parse_args(argv)
    rows = [_recorded(given.run)] if given.run else []
    few = min(given.train, _FILLER_TRAIN)
    cases: list[tuple[str, Callable[[np.random.Generator], dict[str, Any]]]] = [
        ("count", lambda rng: _unseen(count, given.train, rng)),
        ("errands", lambda rng: _unseen(errands, given.train, rng)),
        *(
            (n, functools.partial(_unseen, functools.partial(filler, shape), few))
            for n, shape in SHAPES.items()
        ),
        ("errands among filler", lambda rng: _unseen(errands_among_filler, few, rng)),
        ("functions", lambda rng: _real(few if quick else given.train, rng)),
        ("drift", _again),
    ]
    for name, measure in track(cases, "ranker", console=Console(stderr=True)):
        found = [measure(np.random.default_rng([given.seed, number])) for number in range(given.draws)]
        rows.append(
            {"prompts": name, **{key: np.mean([one[key] for one in found], axis=0) for key in found[0]}}
        )
    result = _report(rows)
    result["cost"] = {"window": window_cost(), "many": many_at_once(), "backbone": backbone_cost()}
    _report_cost(result["cost"])
    return result


def _unseen(
    draw: Callable[[int, np.random.Generator], list[Asked]], number: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Trained on some prompts, judged by others."""
    asked = draw(number + _JUDGED, rng)
    row = _trained([one.group for one in asked[:number]], [one.group for one in asked[number:]])
    known = _of(np.array([one.mean for one in asked[number:]]), [one.group for one in asked[number:]])
    return row | {"best_recall": known.recall, "best_tau": known.tau}


def _real(number: int, rng: np.random.Generator) -> dict[str, Any]:
    found = functions(rng)
    return _trained(found[:number], found[number : number + _JUDGED])


def _trained(learn: list[Answered], rest: list[Answered]) -> dict[str, Any]:
    began = time.process_time()
    ranker = train_ranker(_cut(learn), NoBackbone(), seed=1)
    train_s = time.process_time() - began
    began = time.process_time()
    ranker.predict([group.question for group in rest])
    cost = (time.process_time() - began) / len(rest)
    alone = _of(ranker.read([group.question for group in rest]).network, rest)
    plain = _of(ridge(learn, rest), rest)
    quality = judged(ranker, rest)
    return {
        "recall": quality.recall, "tau": quality.tau, "ridge_recall": plain.recall, "ridge_tau": plain.tau,
        "network_recall": alone.recall, "network_tau": alone.tau,
        "train_s": train_s, "prompt_us": 1e6 * cost,
    }  # fmt: skip


def _again(rng: np.random.Generator) -> dict[str, Any]:
    """Learning on, epoch after epoch: an iteration is ranked before it is generated. The last four epochs."""
    ranker = Ranker.fresh(1, NoBackbone(), typical=100.0)
    found, best, before = [], [], []
    last: dict[int, float] = {}
    cpu, iterations, asking = 0.0, 0, 0.0
    for epoch, asked in enumerate(drift(8, rng)):
        groups, said = [one.group for one in asked], []
        for iteration in _cut(groups):
            began = time.process_time()
            said += ranker.predict([group.question for group in iteration]).tolist()
            asking += time.process_time() - began
            began = time.process_time()
            ranker = ranker.learned(iteration)
            cpu, iterations = cpu + time.process_time() - began, iterations + 1
        if epoch >= 4:
            found.append(_of(np.array(said), groups))
            best.append(_of(np.array([one.mean for one in asked]), groups))
            before.append(_of(np.array([last[group.question.key] for group in groups]), groups))
        last = {group.question.key: float(np.mean(group.lengths)) for group in groups}
    ours, known, last_said = _mean(found), _mean(best), _mean(before)
    return {
        "recall": ours.recall, "tau": ours.tau, "best_recall": known.recall, "best_tau": known.tau,
        "last_epoch_recall": last_said.recall, "last_epoch_tau": last_said.tau,
        "train_s": cpu,
        "window_ms": 1e3 * cpu / iterations,
        "prompt_us": 1e6 * asking / iterations / _WINDOW,
    }  # fmt: skip


def _recorded(run: str) -> dict[str, Any]:
    from flows.run.locations import store_url
    from infra.run_bus import connect
    from infra.runs import find
    from infra.stores.opening import open_store
    from schemas.topics import Topics

    record = find(open_store(store_url("local")), run)
    bus = connect(record, "bench")
    try:
        iterations = recorded(bus, Topics(run, record.spec.lengths.classes), deadline_s=60)
    finally:
        bus.close()
    learn, rest = split(iterations)
    began = time.process_time()
    ranker = train_ranker(learn, NoBackbone(), seed=1)
    quality = judged(ranker, rest)
    return {
        "prompts": run,
        "recall": quality.recall,
        "tau": quality.tau,
        "train_s": time.process_time() - began,
    }


def _cut(groups: Sequence[Answered]) -> list[list[Answered]]:
    return [list(groups[start : start + _WINDOW]) for start in range(0, len(groups), _WINDOW)]


def _of(said: np.ndarray, groups: Sequence[Answered]) -> Quality:
    true = np.array([np.mean(group.lengths) for group in groups])
    score = score_of(said, [group.lengths for group in groups])
    return Quality(len(groups), score.recall, tau(said, true), score.error)


def _mean(found: Sequence[Quality]) -> Quality:
    recall = np.mean([one.recall for one in found], axis=0).tolist()
    return Quality(
        found[0].groups, (recall[0], recall[1], recall[2]), float(np.mean([q.tau for q in found])), 0.0
    )


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = Table(title="recall of the longest 20 / 10 / 5 %, and Kendall's tau")
    columns = {
        "ranker": "", "ridge": "ridge_", "network alone": "network_", "who knows the means": "best_",
        "the last epoch's": "last_epoch_",
    }  # fmt: skip
    table.add_column("prompts")
    for column in columns:
        table.add_column(column)
        table.add_column("tau")
    table.add_column("trained in")

    def cells(row: dict[str, Any], prefix: str) -> list[str]:
        if f"{prefix}recall" not in row:
            return ["", ""]
        recall = (f"{share:.2f}" for share in row[f"{prefix}recall"])
        return [" / ".join(recall), f"{row[f'{prefix}tau']:.2f}"]

    for row in rows:
        told = [cell for prefix in columns.values() for cell in cells(row, prefix)]
        table.add_row(row["prompts"], *told, f"{row['train_s']:.1f} s")
    Console(width=170).print(table)
    return {
        "rows": [
            {k: v if isinstance(v, str) else np.round(v, 4).tolist() for k, v in row.items()} for row in rows
        ]
    }


def _report_cost(cost: dict[str, dict[str, float]]) -> None:
    table = Table("cost", "found", title="cost on this machine's CPU")
    for name, found in cost.items():
        table.add_row(name, ", ".join(f"{key} {value:g}" for key, value in found.items()))
    Console(width=170).print(table)
