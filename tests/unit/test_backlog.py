"""A generator's backlog: its share, longest first, without what is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from producers.backlog import Backlog
from schemas.messages import TRAIN, Prompt
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec

SPEC = make_spec()


def prompt(group: int, **fields: Any) -> Prompt:
    values: dict[str, Any] = {
        "run": "test-1", "purpose": TRAIN, "group": group, "size": 2, "problem_id": "p",
        "problem": json.dumps({}), "epoch": 0, "tokens": np.array([1], dtype=np.int32), "window": group // 4,
        "mini": 0, "bundle": group, "bundle_groups": 1, "min_version": group // 4,
        "predicted": float(group % 4), "predictor": "x", "length_class": 0, "edges": [], "admitted_at": 0.0,
    }  # fmt: skip
    return Prompt(**{**values, **fields})


def test_oldest_window_first_then_the_longest_and_only_with_fit_weights() -> None:
    backlog = Backlog(0, 1)
    for group in (5, 0, 3, 2, 4):
        backlog.add(prompt(group))
    taken = []
    while (job := backlog.take(0)) is not None:
        taken.append((job.prompt.group, job.index))
    assert taken == [(3, 0), (3, 1), (2, 0), (2, 1), (0, 0), (0, 1)]
    assert backlog.needs() == 1
    assert backlog.take(1).prompt.group == 5  # type: ignore[union-attr]


def test_generators_share_every_group_once() -> None:
    backlogs = [Backlog(instance, 3) for instance in range(3)]
    shares = [[group for group in range(20) if backlog.add(prompt(group))] for backlog in backlogs]
    assert sorted(group for share in shares for group in share) == list(range(20))
    assert all(backlog.add(prompt(group)) == 0 for backlog in backlogs for group in range(20))


def test_after_a_restart_only_what_is_missing_is_made(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    for group, index in ((0, 0), (0, 1), (1, 1)):
        context.writer.send(context.topics.samples, encode(make_sample(SPEC, group, index)), key="k")
    backlog = Backlog(0, 1)
    backlog.recover(context.bus, context.topics, lookahead=0.0, deadline_s=5)
    assert [backlog.add(prompt(group)) for group in range(3)] == [0, 1, 2]
    assert backlog.take(0) is not None
