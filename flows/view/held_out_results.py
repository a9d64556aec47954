"""Compares the rewards of held-out problems before and after: with the first weights and with the last."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schemas.messages import Evaluation

LONGEST_SHARE = 0.2


def comparison(
    evaluations: Sequence[Evaluation], problems: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the table's rows: all problems, and the longest fifth of them by each measure of length.

    Empty if fewer than two versions were evaluated.
    """
    newest = {record.version: record for record in evaluations}
    if len(newest) < 2:
        return []
    first, last = newest[min(newest)], newest[max(newest)]
    before, after = _by_problem(first, first.rewards), _by_problem(last, last.rewards)
    names = sorted(set(before) & set(after))
    rows = [_row("all held-out problems", names, before, after)]
    known = known_lengths(problems)
    if set(names) <= set(known):
        rows.append(_row("the longest fifth, by the right answer", longest(names, known), before, after))
    sampled = _by_problem(last, last.lengths)
    rows.append(
        _row("the longest fifth, by what was sampled at the end", longest(names, sampled), before, after)
    )
    return rows


def known_lengths(problems: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the lengths of right answers by id: a problem's `length`, or the length of its `answer`."""
    found = {}
    for problem in problems:
        length, answer = problem.get("length"), problem.get("answer")
        if isinstance(length, int | float) and not isinstance(length, bool):
            found[str(problem["id"])] = float(length)
        elif isinstance(answer, str):
            found[str(problem["id"])] = float(len(answer))
    return found


def longest(names: Sequence[str], lengths: Mapping[str, float]) -> list[str]:
    """Return the longest fifth; among equals the name decides, so that it is the same fifth every time."""
    ranked = sorted(names, key=lambda name: (-lengths[name], name))
    return ranked[: math.ceil(LONGEST_SHARE * len(ranked))]


def _by_problem(record: Evaluation, values: np.ndarray) -> dict[str, float]:
    """Return each problem's mean over its samples. NaN (no reward could be had) is left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in zip(record.problem_ids, values, strict=True):
        if not math.isnan(value):
            found[name].append(float(value))
    return {name: sum(each) / len(each) for name, each in found.items()}


def _row(
    what: str, names: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, Any]:
    first = [before[name] for name in names]
    last = [after[name] for name in names]
    changes = np.array(last) - np.array(first)
    error = float(changes.std(ddof=1) / math.sqrt(changes.size)) if changes.size > 1 else None
    return {
        "what": what,
        "problems": len(names),
        "before": float(np.mean(first)) if first else None,
        "after": float(np.mean(last)) if last else None,
        "gain": float(changes.mean()) if changes.size else None,
        "gain_error": error,
    }
