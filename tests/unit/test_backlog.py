"""A generator's backlog: longest first, and given back when it is withdrawn."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from producers.backlog import Backlog
from producers.dispatch.jobs import SampleJob
from schemas.messages import TRAIN, Prompt


def prompt(group: int, **fields: Any) -> Prompt:
    values: dict[str, Any] = {
        "run": "test-1", "purpose": TRAIN, "group": group, "size": 2, "problem_id": "p",
        "problem": json.dumps({}), "epoch": 0, "tokens": np.array([1], dtype=np.int32),
        "iteration": group // 4, "mini": 0, "bundle": group, "bundle_groups": 1, "min_version": group // 4,
        "predicted": float(group % 4), "predictor": "x", "length_class": 0, "edges": [], "admitted_at": 0.0,
    }  # fmt: skip
    return Prompt(**{**values, **fields})


def filled(*groups: int) -> Backlog:
    backlog = Backlog()
    for group in groups:
        for index in range(2):
            backlog.add(SampleJob(prompt(group), index))
    return backlog


def test_oldest_window_first_then_the_longest_and_only_with_fit_weights() -> None:
    backlog = filled(5, 0, 3, 2, 4)
    taken = []
    while (job := backlog.take(0)) is not None:
        taken.append(job.key)
    assert taken == [(3, 0), (3, 1), (2, 0), (2, 1), (0, 0), (0, 1)]
    assert backlog.needs() == 1
    assert backlog.take(1).prompt.group == 5  # type: ignore[union-attr]


def test_what_is_withdrawn_is_given_back_once_if_it_is_still_there() -> None:
    backlog = filled(0, 1)
    assert backlog.take(0) is not None  # (1, 0) is begun
    assert sorted(job.key for job in backlog.give_back({(1, 0), (1, 1), (0, 1)})) == [(0, 1), (1, 1)]
    assert backlog.give_back({(1, 1)}) == []
    assert [job.key for job in backlog] == [(0, 0)]
