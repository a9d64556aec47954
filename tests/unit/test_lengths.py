"""Length classes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from producers.lengths import class_edges, class_of, have_moved


@given(st.lists(st.floats(1, 500), min_size=1, max_size=200), st.integers(1, 8))
def test_edges_grow_and_every_length_has_a_class(lengths: list[float], classes: int) -> None:
    edges = class_edges(lengths, classes)
    if edges is None:
        assert max(lengths) <= min(lengths) * 1.001
        return
    assert len(edges) == classes - 1
    assert edges == sorted(set(edges))
    assert all(0 <= class_of(length, edges) < classes for length in lengths)


def test_edges_are_quantiles() -> None:
    edges = class_edges([float(number) for number in range(100)], 4)
    assert edges == [25.0, 50.0, 75.0]


def test_only_a_real_change_moves_them() -> None:
    assert have_moved([math.inf, math.inf], [10.0, 20.0])
    assert not have_moved([10.0, 20.0], [10.2, 19.5])
    assert have_moved([10.0, 20.0], [10.2, 25.0])
