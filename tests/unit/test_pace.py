"""What is known of an engine's steps."""

from __future__ import annotations

import pytest

from producers.engines.pace import StepTimes


def test_a_few_steps_are_not_enough_and_like_sizes_are_one_point() -> None:
    times = StepTimes()
    for samples in (5, 6, 7, 8):
        times.add(samples, samples / 100)
    assert times.pace().batches == []
    for samples in (5, 6, 7, 8, 1):
        times.add(samples, samples / 100)
    pace = times.pace()
    assert pace.batches == [7]
    assert pace.seconds == [pytest.approx(0.065, rel=0.01)]


def test_what_is_expected_counts_until_steps_say_otherwise() -> None:
    times = StepTimes()
    times.expect(64, 0.5)
    assert times.pace().seconds == [pytest.approx(0.5)]
    for _ in range(100):
        times.add(64, 1.0)
    assert times.pace().batches == [64]
    assert times.pace().seconds[0] > 0.95
