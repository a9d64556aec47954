"""How well the length ranker ranks, on prompts that it has not seen and on prompts that come again.

Recall of the longest 20, 10 and 5 % of groups (by their mean length) and Kendall's tau, beside the same of
one who knows each prompt's true mean: no ranker can be better than that. The StreamRL paper's ranker, a
language model of 7B parameters, has recalls of .87, .82 and .76.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from producers.ranker.offline import Quality, judged, recorded, split, tau, train_ranker
from producers.ranker.ranker import Answered, NoBackbone, Ranker, score_of
from tests.bench._prompts import Asked, count, drift, errands

_WINDOW = 64


def main(*, quick: bool, argv: Sequence[str]) -> dict[str, Any]:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench ranker")
    parser.add_argument("--seed", type=int, default=0, help="draw anew")
    parser.add_argument("--draws", type=int, default=1 if quick else 3)
    parser.add_argument("--train", type=int, default=4096, help="groups to learn from")
    parser.add_argument("--run", help="also what a run of the local store recorded, such as count-1")
    given = parser.parse_args(argv)
    rows = [_recorded(given.run)] if given.run else []
    cases: list[tuple[str, Callable[[np.random.Generator], dict[str, Any]]]] = [
        ("count", lambda rng: _unseen(count, given.train, rng)),
        ("errands", lambda rng: _unseen(errands, given.train, rng)),
        ("drift", _again),
    ]
    for name, measure in track(cases, "ranker", console=Console(stderr=True)):
        found = [measure(np.random.default_rng([given.seed, number])) for number in range(given.draws)]
        rows.append(
            {"prompts": name, **{key: np.mean([one[key] for one in found], axis=0) for key in found[0]}}
        )
    return _report(rows)


def _unseen(
    draw: Callable[[int, np.random.Generator], list[Asked]], number: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Trained on some prompts, judged by others."""
    asked = draw(number + 1024, rng)
    learn, rest = [one.group for one in asked[:number]], asked[number:]
    began = time.process_time()
    ranker = train_ranker(_cut(learn), NoBackbone(), seed=1)
    train_s = time.process_time() - began
    groups = [one.group for one in rest]
    began = time.process_time()
    ranker.predict([group.question for group in groups])
    cost = (time.process_time() - began) / len(groups)
    known = _of(np.array([one.mean for one in rest]), groups)
    return _row(judged(ranker, groups), known) | {"train_s": train_s, "prompt_us": 1e6 * cost}


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
    row = _row(_mean(found), _mean(best))
    row |= {"last_epoch_recall": _mean(before).recall, "last_epoch_tau": _mean(before).tau}
    return row | {
        "train_s": cpu,
        "window_ms": 1e3 * cpu / iterations,
        "prompt_us": 1e6 * asking / iterations / _WINDOW,
    }


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


def _row(found: Quality, known: Quality) -> dict[str, Any]:
    return {"recall": found.recall, "tau": found.tau, "best_recall": known.recall, "best_tau": known.tau}


def _report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = Table(title="recall of the longest 20 / 10 / 5 %, and Kendall's tau")
    columns = (
        "prompts",
        "ranker",
        "tau",
        "who knows the means",
        "tau ",
        "the last epoch's",
        "tau  ",
        "trained in",
    )
    for column in columns:
        table.add_column(column.strip())

    def cells(row: dict[str, Any], recall: str, tau_key: str) -> list[str]:
        if recall not in row:
            return ["", ""]
        return [" / ".join(f"{r:.2f}" for r in row[recall]), f"{row[tau_key]:.2f}"]

    for row in rows:
        table.add_row(
            row["prompts"], *cells(row, "recall", "tau"), *cells(row, "best_recall", "best_tau"),
            *cells(row, "last_epoch_recall", "last_epoch_tau"), f"{row['train_s']:.1f} s",
        )  # fmt: skip
    Console(width=130).print(table)
    return {
        "rows": [
            {k: v if isinstance(v, str) else np.round(v, 4).tolist() for k, v in row.items()} for row in rows
        ]
    }
