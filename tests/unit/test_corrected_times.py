"""Analytic times that measured points correct."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.planning.corrected_times import REACH, UNSURE, SmoothRatio, corrected_engine, corrected_learner
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


@given(
    places=st.lists(st.tuples(st.integers(0, 10), st.integers(3, 14)), min_size=1, max_size=12, unique=True),
    factor=st.floats(0.3, 3.0),
    tilt=st.floats(-0.05, 0.05),
)
def test_a_ratio_is_exact_at_its_points_and_one_far_away(
    places: list[tuple[int, int]], factor: float, tilt: float
) -> None:
    where = np.array(places, float)
    ratios = factor * np.exp(tilt * where[:, 0])
    found = SmoothRatio.of(where, ratios, np.zeros(len(where)), unsure=0.5)
    near, sure = found.at(where)
    assert near == pytest.approx(ratios, rel=0.05)
    assert sure.max() < 0.05
    for far, away in ((where + 12 * REACH, 0.0), (where, 12 * REACH)):
        ratio, unsure = found.at(far, away)
        assert ratio == pytest.approx(np.ones(len(where)), abs=1e-3)
        assert unsure == pytest.approx(np.full(len(where), 0.5), rel=1e-3)


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_what_was_measured_on_one_device_corrects_two_and_less_so_many(factor: float) -> None:
    one = analytic(factor)
    more = EngineTimes(tuple(each / 2 for each in one.batch_s[:65]), one.context_s / 2, spread=0.25)

    def at(doublings: float) -> tuple[float, float]:
        found = corrected_engine(more, points(), measured=one, doublings=doublings)  # type: ignore[arg-type]
        return (found.batch_s[16] + found.context_s * 1000) / (step_s(16, 1000) / 2), found.spread

    (two, sure), (eight, less), (many, unsure) = at(1), at(3), at(40)
    assert two == pytest.approx(1.0, abs=0.07)
    assert abs(two - 1) < abs(eight - 1) < abs(many - 1)
    assert many == pytest.approx(factor, rel=0.01)
    assert sure < less < unsure == pytest.approx(0.25)
    learner, calls = LearnerTimes(factor * 1e-4), [train_point(n, n * 100, 0) for n in (4, 16, 64)]
    two_ranks = corrected_learner(
        LearnerTimes(factor * 5e-5, spread=0.25), calls, measured=learner, doublings=1.0
    )
    assert two_ranks.microbatch_s + two_ranks.token_s * 6400 == pytest.approx(
        call_s(64, 6400, 0, 1) / 2, rel=0.05
    )
    assert 0.02 < two_ranks.spread < 0.15
