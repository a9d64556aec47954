"""What is believed of lengths that few or none of the known samples had, and of the last of many parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch.beliefs import LEVELS, Beliefs
from producers.dispatch.state import mean_of_last

BUDGET = 1_000_000


def learned(seed: int, count: int, size: int, deviation: float, predicted: float = 5000.0) -> Beliefs:
    """Learned of groups whose errors are normal, two thirds of the variance shared by a group."""
    rng = np.random.default_rng(seed)
    beliefs = Beliefs(BUDGET)
    shared = rng.normal(0, deviation * np.sqrt(2 / 3), (count // size, 1))
    errors = shared + rng.normal(0, deviation * np.sqrt(1 / 3), (count // size, size))
    beliefs.observe([[(predicted, float(predicted * np.exp(one))) for one in group] for group in errors])
    beliefs.observe([[(float(BUDGET), float(BUDGET))]])  # so that no length is cut off
    beliefs.quantiles(np.ones(1))  # computes all that follows
    return beliefs


@pytest.mark.parametrize("size", [1, 8])
def test_the_unlikely_length_is_believed_as_normal_errors_have_it(size: int) -> None:
    found = [
        np.log(learned(seed, 1024, size, 0.25).quantiles(np.array([5000.0]))[0, -1] / 5000.0)
        for seed in range(20)
    ]
    assert np.mean(found) == pytest.approx(0.25 * LEVELS[-1], rel=0.12)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([1, 4, 8]), st.floats(0.05, 1.0),
    st.lists(st.floats(0.001, 0.9999), min_size=2, max_size=20),
)  # fmt: skip
def test_shares_and_errors_are_read_both_ways_and_grow_together(
    seed: int, size: int, deviation: float, shares: list[float]
) -> None:
    beliefs = learned(seed, 512, size, deviation)
    place = int(beliefs._bin(np.array([5000.0]))[0])
    ordered = np.sort(shares)
    errors = beliefs._error_at(ordered, place)
    assert np.all(np.diff(errors) >= 0)
    assert beliefs._share_at(errors, place) == pytest.approx(ordered, abs=2 / 512)


def test_true_predictions_have_no_unlikely_length() -> None:
    exact = Beliefs(BUDGET)
    exact.observe([[(float(length), float(length))] for length in range(100, 1000)])
    assert exact.quantiles(np.array([500.0]))[0] == pytest.approx(500.0)


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=60), st.floats(1.0, 1000.0), st.floats(1.0, 1000.0))
def test_the_last_of_many_parts_ends_later_than_one_and_no_later_than_the_worst(
    ends: list[float], few: float, many: float
) -> None:
    few, many = min(few, many), max(few, many)
    each = np.array(ends)
    assert mean_of_last(each, 1.0) == pytest.approx(each.mean())
    assert mean_of_last(each, few) <= mean_of_last(each, many) * (1 + 1e-9)
    assert mean_of_last(each, many) <= each.max() * (1 + 1e-9)


def test_the_last_of_two_parts_is_the_mean_of_all_pairs() -> None:
    each = np.array([3.0, 1.0, 7.0])
    assert mean_of_last(each, 2.0) == pytest.approx(np.maximum.outer(each, each).mean())
