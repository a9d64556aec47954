"""How many tokens are drafted: those that pay by measured times, and none where they don't."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.engines.acceptance import Acceptance
from producers.engines.draft_plan import LOOK, DraftPlan
from producers.engines.engine import Pace

FLAT = Pace([1, 8, 64, 256], [0.01, 0.01, 0.01, 0.01])
STEEP = Pace([1, 8, 64, 256], [0.001, 0.008, 0.064, 0.256])


def plan_of(pace: Pace) -> DraftPlan:
    plan = DraftPlan()
    plan.learn(pace)
    return plan


def test_rows_that_cost_nothing_are_filled_and_dear_ones_are_not() -> None:
    assert plan_of(FLAT).lengths(4, 4, [[0.5, 0.1], [0.2], [], [0.9]]) == [2, 1, 0, 1]
    assert plan_of(STEEP).lengths(4, 4, [[0.5, 0.1], [0.2], [], [0.9]]) == [0, 0, 0, 0]


def test_only_likely_tokens_are_drafted_where_rows_cost_something() -> None:
    pace = Pace([1, 100], [0.01, 0.10])  # a row more costs a tenth of a small step
    assert plan_of(pace).lengths(2, 2, [[0.9, 0.8, 0.1], [0.05]]) == [2, 0]


def test_a_few_samples_are_looked_at_for_a_hundredth_of_the_time_where_drafts_do_not_pay() -> None:
    plan, looked, steps = plan_of(STEEP), 0, 4000
    for _ in range(steps):
        if found := plan.attention(64):
            assert found == LOOK
            looked += 1
            plan.lengths(64, found, [[0.5]] * found)
            plan.drafting_took(found, found * 5e-5)
        plan.step_took(64, 0, 0.064)
    assert 0 < looked * LOOK * 5e-5 <= 0.0101 * steps * 0.064 + 1e-3


def test_drafts_for_all_begin_when_a_look_says_that_they_pay_and_end_when_steps_say_otherwise() -> None:
    plan = plan_of(FLAT)
    assert plan.attention(32) == LOOK
    plan.lengths(32, LOOK, [[0.9] * 4] * LOOK)
    assert plan.attention(31) == 31
    assert sum(plan.lengths(31, 31, [[0.9] * 4] * 31)) == 31 * 4
    for _ in range(40):
        plan.step_took(31, 124, 0.2)  # twenty times as long as it should
    assert plan.lengths(31, 31, [[0.9] * 4] * 31) == [0] * 31


def test_without_measured_steps_nothing_is_drafted() -> None:
    assert DraftPlan().attention(1) == 0


def test_a_small_step_that_was_disturbed_does_not_make_large_ones_seem_cheap() -> None:
    pace = Pace([1, 8, 64, 256], [0.05, 0.008, 0.064, 0.256])
    assert plan_of(pace).lengths(1, 1, [[0.01]]) == [0]


chances = st.lists(st.lists(st.floats(0.01, 0.99), max_size=16).map(lambda one: sorted(one, reverse=True)))


@given(chances, st.lists(st.floats(1e-4, 1), min_size=4, max_size=4), st.integers(1, 300))
def test_lengths_fit_the_drafts_whatever_was_measured(
    chances: list[list[float]], seconds: list[float], more: int
) -> None:
    plan, samples = plan_of(Pace([1, 8, 64, 256], seconds)), len(chances) + more
    plan.attention(samples)
    found = plan.lengths(samples, samples, chances)
    assert all(0 <= length <= len(draft) for length, draft in zip(found, chances, strict=True))


def test_long_matches_are_trusted_as_far_as_they_were_right() -> None:
    learned = Acceptance()
    for number in range(300):
        learned.judge(f"s{number}", 3, [1, 2], [9, 9])
        learned.judge(f"s{number}", 20, [1, 2, 3], [1, 2, 3])
    assert learned.chances("new", 3, 4, 0.05) == []
    assert learned.chances("new", 20, 3, 0.05)[-1] > 0.9


def test_a_sample_whose_drafts_are_refused_rests_longer_and_longer() -> None:
    learned = Acceptance()
    for number in range(300):
        learned.judge(f"s{number}", 20, [1], [1])
    drafted, at = [], 0
    for at in range(400):
        if learned.rests("bad"):
            continue
        drafted.append(at)
        learned.chances("bad", 20, 1, 0.5)
        learned.judge("bad", 20, [1], [9])
    assert 4 < len(drafted) < 24
    assert drafted[-1] - drafted[-2] == 65
    assert learned.chances("good", 20, 1, 0.5)
    learned.forget("bad")
    assert not learned.rests("bad")
    assert at == 399


@pytest.mark.parametrize("pace", [FLAT, STEEP])
def test_now_and_then_a_step_is_plain(pace: Pace) -> None:
    plan, plain = plan_of(pace), 0
    for _ in range(320):
        plan.attention(2)
        plain += not sum(plan.lengths(2, 2, [[0.99] * 8] * 2))
    assert plain >= 10
