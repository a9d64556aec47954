"""Length prediction from history, and classes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from producers.lengths import HistoryPredictor, class_of, learn_edges


def test_own_history_beats_that_of_the_kind_beats_all() -> None:
    predictor = HistoryPredictor(200)
    for _ in range(20):
        predictor.observe("short", "a", 5)
        predictor.observe("long", "b", 150)
    assert predictor.predict("short", "a") < 10
    assert predictor.predict("long", "b") > 100
    assert predictor.predict("new", "a") < predictor.predict("new", "c") < predictor.predict("new", "b")
    assert predictor.version == "history/40"


def test_it_follows_a_policy_that_drifts() -> None:
    predictor = HistoryPredictor(200)
    for _ in range(100):
        predictor.observe("p", "k", 10)
    for _ in range(100):
        predictor.observe("p", "k", 100)
    assert predictor.predict("p", "k") > 60


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(1, 8))
def test_edges_grow_and_every_length_has_a_class(lengths: list[int], classes: int) -> None:
    edges = learn_edges(lengths, classes)
    assert len(edges) == classes - 1
    assert edges == sorted(set(edges))
    assert all(0 <= class_of(length, edges) < classes for length in lengths)
