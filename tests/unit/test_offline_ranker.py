"""Rankers trained at leisure from what is on a run's log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from producers.ranker.offline import judged, recorded, split, tau, train
from producers.ranker.ranker import Answered, NoBackbone, question_of
from schemas.messages import EVAL
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.unit.test_backlog import prompt

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2})


def test_whole_groups_are_found_in_the_order_of_their_iterations(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    for group in (5, 0, 1, 4):
        asked = prompt(group, problem='{"kind": "k"}', tokens=np.array([group, 7], np.int32))
        context.writer.send(context.topics.prompts, encode(asked), key=str(group))
    for group, index in ((5, 1), (5, 0), (0, 0), (0, 1), (0, 1), (1, 0), (9, 0), (9, 1)):
        sample = make_sample(SPEC, group, index, length=10 * group + index + 1)
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    other = make_sample(SPEC, 1, 1, purpose=EVAL)
    context.writer.send(context.topics.samples, encode(other), key=other.id)
    context.writer.send(context.topics.samples, b"junk", key="junk")
    windows = recorded(context.bus, context.topics, deadline_s=5)
    assert [[list(group.lengths) for group in window] for window in windows] == [[[1, 2]], [[51, 52]]]
    assert windows[1][0].question.text.tolist() == [5, 7] and windows[1][0].question.kind


def test_training_at_leisure_ranks_what_it_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    groups = [
        Answered(question_of(str(n), None, words.tolist()), [round(float(np.sum(3.0 * 1.6**words)))] * 2)
        for n, words in enumerate(rng.integers(0, 14, (600, 4)))
    ]
    windows = [groups[start : start + 50] for start in range(0, 600, 50)]
    learn, held_out = split(windows)
    assert sum(map(len, learn)) + len(held_out) == 600 and 60 < len(held_out) < 180
    shares: list[float] = []
    ranker = train(learn, NoBackbone(), seed=1, progress=shares.append)
    quality = judged(ranker, held_out)
    assert quality.groups == len(held_out)
    assert quality.recall[0] > 0.85 and quality.tau > 0.8 and quality.error < 0.2
    assert shares == sorted(shares) and shares[-1] > 0.9


def test_tau() -> None:
    assert tau(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1.0)
    assert tau(np.array([3.0, 2, 1]), np.array([10.0, 20, 30])) == pytest.approx(-1.0)
    assert tau(np.array([1.0, 1, 1]), np.array([10.0, 20, 30])) == 0.0
    assert tau(np.array([1.0, 2, 2]), np.array([1.0, 2, 3])) == pytest.approx(2 / np.sqrt(2 * 3))
