"""Rankers trained at leisure from what is on a run's log."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flows.cli import app
from producers.ranker import offline
from producers.ranker.offline import judged, recorded, split, tau, train_ranker
from producers.ranker.ranker import Answered, NoBackbone, question_of
from schemas.messages import EVAL
from schemas.wire import encode
from tests.factories import make_context, make_sample, make_spec
from tests.unit.test_backlog import prompt

SPEC = make_spec(algorithm={"groups": 4, "group_size": 2})


def test_whole_groups_are_found_in_the_order_of_their_iterations(tmp_path: Path) -> None:
    context = make_context(SPEC, tmp_path)
    for group in (5, 0, 1, 4):
        asked = prompt(
            group, problem_id=str(group), problem='{"kind": "k"}', tokens=np.array([group, 7], np.int32)
        )
        context.writer.send(context.topics.prompts, encode(asked), key=str(group))
    for group, index in ((5, 1), (5, 0), (0, 0), (0, 1), (0, 1), (1, 0), (9, 0), (9, 1)):
        sample = make_sample(SPEC, group, index, length=10 * group + index + 1)
        context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    other = make_sample(SPEC, 1, 1, purpose=EVAL)
    context.writer.send(context.topics.samples, encode(other), key=other.id)
    context.writer.send(context.topics.samples, b"junk", key="junk")
    iterations = recorded(context.bus, context.topics, deadline_s=5)
    assert [[list(group.lengths) for group in iteration] for iteration in iterations] == [
        [[1, 2]],
        [[51, 52]],
    ]
    assert iterations[1][0].question.text.tolist() == [5, 7] and iterations[1][0].question.kind


def test_training_at_leisure_ranks_what_it_has_not_seen() -> None:
    rng = np.random.default_rng(0)
    groups = [
        Answered(question_of(str(n), None, words.tolist()), [round(float(np.sum(3.0 * 1.6**words)))] * 2)
        for n, words in enumerate(rng.integers(0, 14, (600, 4)))
    ]
    iterations = [groups[start : start + 50] for start in range(0, 600, 50)]
    learn, held_out = split(iterations)
    assert sum(map(len, learn)) + len(held_out) == 600 and 60 < len(held_out) < 180
    shares: list[float] = []
    ranker = train_ranker(learn, NoBackbone(), seed=1, progress=shares.append)
    quality = judged(ranker, held_out)
    assert quality.groups == len(held_out)
    assert quality.recall[0] > 0.85 and quality.tau > 0.8 and quality.error < 0.2
    assert shares == sorted(shares) and shares[-1] > 0.9


def test_tau() -> None:
    assert tau(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1.0)
    assert tau(np.array([3.0, 2, 1]), np.array([10.0, 20, 30])) == pytest.approx(-1.0)
    assert tau(np.array([1.0, 1, 1]), np.array([10.0, 20, 30])) == 0.0
    assert tau(np.array([1.0, 2, 2]), np.array([1.0, 2, 3])) == pytest.approx(2 / np.sqrt(2 * 3))
    assert tau(np.zeros(0), np.zeros(0)) == tau(np.ones(1), np.ones(1)) == 0.0


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=40))
def test_tau_is_that_of_its_definition(pairs: list[tuple[int, int]]) -> None:
    said, true = np.array(pairs, float).T
    above, right = np.sign(said[:, None] - said[None]), np.sign(true[:, None] - true[None])
    both = np.sqrt(np.abs(above).sum() * np.abs(right).sum())
    assert tau(said, true) == pytest.approx((above * right).sum() / both if both else 0.0)


def test_tau_of_many_takes_little_memory() -> None:
    """Each pair for itself would be 24 bytes: a hundred gigabytes."""
    count = 1 << 16
    said = np.random.default_rng(0).random(count)
    tracemalloc.start()
    try:
        assert tau(said, said**3) == pytest.approx(1.0)
        assert abs(tau(said, np.random.default_rng(1).random(count))) < 0.02
        assert tracemalloc.get_traced_memory()[1] < 400 * count
    finally:
        tracemalloc.stop()


def test_of_many_groups_the_newest_are_kept_and_a_problem_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "_MOST_GROUPS", 8)
    context = make_context(SPEC, tmp_path)
    for group in range(40):
        asked = prompt(group, problem="{" if group % 2 else "[1]", problem_id=str(group % 2))
        context.writer.send(context.topics.prompts, encode(asked), key=str(group))
        for index in range(2):
            sample = make_sample(SPEC, group, index, problem_id=str(group % 2))
            context.writer.send(context.topics.samples, encode(sample), key=sample.id)
    iterations = recorded(context.bus, context.topics, deadline_s=5)
    groups = [group for iteration in iterations for group in iteration]
    assert 8 <= len(groups) < 16 and len({id(group.question) for group in groups}) == 2


def test_its_name_stays_in_the_folder_of_rankers() -> None:
    for name in ("../../x", "a/b", "", "a b"):
        result = CliRunner().invoke(app, ["ranker", "count-1", "--name", name])
        assert result.exit_code == 2 and "it becomes part of a key" in result.stderr
