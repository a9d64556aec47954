"""Admission bounds staleness, for every lookahead, and each iteration trains its own groups."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from schemas.admission import admissible, iteration_of, oldest_version

groups_in = st.integers(1, 64)
lookaheads = st.one_of(
    st.integers(0, 8).map(float), st.floats(0, 8, allow_nan=False).map(lambda k: round(k, 2))
)


@given(st.integers(0, 200), groups_in, lookaheads)
def test_staleness_is_bounded_and_so_is_its_mean(iteration: int, groups: int, lookahead: float) -> None:
    members = range(iteration * groups, (iteration + 1) * groups)
    assert all(iteration_of(group, groups) == iteration for group in members)
    staleness = [iteration - oldest_version(group, groups, lookahead) for group in members]
    assert min(staleness) >= 0
    assert max(staleness) <= math.ceil(lookahead)
    assert sum(staleness) / groups <= lookahead + 1e-6


@given(st.integers(0, 5000), groups_in, lookaheads)
def test_a_group_is_admitted_by_exactly_the_version_it_names(
    group: int, groups: int, lookahead: float
) -> None:
    version = oldest_version(group, groups, lookahead)
    assert admissible(version, groups, lookahead) > group
    assert version == 0 or admissible(version - 1, groups, lookahead) <= group


@given(st.integers(0, 200), groups_in)
def test_sync_is_on_policy(version: int, groups: int) -> None:
    assert admissible(version, groups, 0.0) == (version + 1) * groups
    assert oldest_version(version * groups, groups, 0.0) == version


@given(st.integers(0, 200), groups_in, lookaheads)
def test_training_never_waits_for_a_group_that_is_not_admitted(
    version: int, groups: int, lookahead: float
) -> None:
    assert admissible(version, groups, lookahead) >= (version + 1) * groups
