"""Analytic times that measured points correct."""

from __future__ import annotations

import pytest

from flows.planning.corrected_times import UNSURE, corrected_engine, corrected_learner
from flows.planning.stage_times import EngineTimes, LearnerTimes
from tests.profiles import BATCH_S, CONTEXT_S, PROMPT_S, call_s, decode_point, step_s, train_point

SLOTS = 4096


def analytic(factor: float = 1.0, spread: float = 0.0) -> EngineTimes:
    """The machine of the tests, but for a factor."""
    table = [factor * (BATCH_S[0] + BATCH_S[1] * max(1, size)) for size in range(SLOTS + 1)]
    return EngineTimes(tuple(table), factor * CONTEXT_S, prefill_s=factor * PROMPT_S, spread=spread)


def points() -> list[object]:
    return [decode_point(size, size * each) for size in (1, 4, 16) for each in (30, 100)]


@pytest.mark.parametrize("factor", [0.6, 1.0, 1.5])
def test_near_the_points_the_times_are_the_measured_ones(factor: float) -> None:
    found = corrected_engine(analytic(factor), points())  # type: ignore[arg-type]
    for samples, context in [(1, 60), (8, 500), (16, 1000)]:
        seconds = found.batch_s[samples] + found.context_s * context
        assert seconds == pytest.approx(step_s(samples, context), rel=0.05)


def test_far_from_the_points_they_are_the_analytic_ones_and_unsure() -> None:
    found = corrected_engine(analytic(1.5), points())  # type: ignore[arg-type]
    far = found.batch_s[SLOTS] + found.context_s * SLOTS * 65
    assert far == pytest.approx(1.5 * step_s(SLOTS, SLOTS * 65), rel=0.1)
    assert found.spread == pytest.approx(UNSURE, rel=0.1)
    near = corrected_engine(
        EngineTimes(analytic(1.5).batch_s[:17], 1.5 * CONTEXT_S),
        points(),  # type: ignore[arg-type]
    )
    assert near.spread < 0.1


def test_the_table_never_falls_and_stays_above_zero() -> None:
    odd = [decode_point(16, 1600, seconds=1e-4), decode_point(1, 100)]
    table = corrected_engine(analytic(), odd).batch_s
    assert table[0] > 0
    assert list(table) == sorted(table)


def test_prefill_is_corrected_too() -> None:
    begun = [decode_point(size, size * 20, begun=size, prompt=size * 20.0) for size in (4, 16)]
    steps = [decode_point(size, size * 20) for size in (1, 4, 16)]
    found = corrected_engine(analytic(2.0), [*steps, *begun])
    assert found.prefill_s == pytest.approx(PROMPT_S + 1e-4 / 20, rel=0.15)
    assert corrected_engine(analytic(2.0), steps).prefill_s == 2 * PROMPT_S


def test_without_points_nothing_is_corrected() -> None:
    assert corrected_engine(analytic(), []) == analytic()
    learner = LearnerTimes(1e-4)
    assert corrected_learner(learner, []) == learner


def test_a_learner_is_corrected_where_it_was_measured() -> None:
    wrong = LearnerTimes(token_s=5e-5, microbatch_s=0.001)
    measured = [train_point(n, n * 100, n * 5000) for n in (4, 16, 64)]
    found = corrected_learner(wrong, measured)
    for samples in (10, 50):
        seconds = found.microbatch_s + found.token_s * samples * 100
        assert seconds == pytest.approx(call_s(samples, samples * 100, samples * 5000, 1), rel=0.1)
    assert found.spread < 0.1
    far = corrected_learner(wrong, measured, tokens=10_000_000)
    assert far.token_s == pytest.approx(wrong.token_s, rel=0.1)
    assert far.spread > 0.3
