"""Admission bounds staleness, for every lookahead, and each iteration trains its own groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.admission import admissible, oldest_version, window_of

groups_in = st.integers(1, 64)
lookaheads = st.one_of(st.integers(0, 8).map(float), st.floats(0, 8, allow_nan=False).map(lambda k: round(k, 2)))


@given(st.integers(0, 5000), groups_in, lookaheads)
def test_staleness_is_bounded(group: int, groups: int, lookahead: float) -> None:
    trained_at = window_of(group, groups)
    staleness = trained_at - oldest_version(group, groups, lookahead)
    assert staleness <= lookahead + 1e-6 or staleness - lookahead < 1  # the whole iterations that k allows
    assert oldest_version(group, groups, lookahead) <= trained_at


@given(st.integers(0, 5000), groups_in, lookaheads)
def test_a_group_is_admitted_by_exactly_the_version_it_names(group: int, groups: int, lookahead: float) -> None:
    version = oldest_version(group, groups, lookahead)
    assert admissible(version, groups, lookahead) > group
    assert version == 0 or admissible(version - 1, groups, lookahead) <= group


@given(st.integers(0, 200), groups_in)
def test_sync_is_on_policy(version: int, groups: int) -> None:
    assert admissible(version, groups, 0.0) == (version + 1) * groups
    assert oldest_version(version * groups, groups, 0.0) == version


@given(st.integers(0, 200), groups_in, lookaheads)
def test_training_never_waits_for_a_group_that_is_not_admitted(version: int, groups: int, lookahead: float) -> None:
    assert admissible(version, groups, lookahead) >= (version + 1) * groups
