"""What members of a group tell of one another, a ranker that turns out to be wrong, and samples that move."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch.beliefs import Beliefs, Kin
from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.common_part import common_parts
from producers.dispatch.deadline import DeadlinePolicy
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.moves import find_moves
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.state import LONGEST_FIRST, state_of
from schemas.messages import TRAIN, Prompt
from tests.bench._lengths import CURVE, paper_lengths
from tests.bench._virtual import generate

LONGEST = 20_000


def group_of(number: int, predicted: float, size: int) -> list[SampleJob]:
    prompt = Prompt(
        run="r", purpose=TRAIN, group=number, size=size, problem_id=str(number), problem="{}", epoch=0,
        tokens=np.zeros(0, np.int32), iteration=0, mini=0, bundle=number, bundle_groups=1, min_version=0,
        predicted=predicted, predictor="", length_class=0, edges=[], admitted_at=0.0,
    )  # fmt: skip
    return [SampleJob(prompt, index) for index in range(size)]


def learned(alike: float, *, groups: int = 256, size: int = 8, seed: int = 0) -> Beliefs:
    """Of a ranker whose errors have so much in common within a group."""
    rng = np.random.default_rng(seed)
    beliefs = Beliefs(LONGEST)
    predicted = rng.uniform(500, 8000, groups)
    common = rng.normal(0, 0.3 * math.sqrt(alike), groups)
    own = rng.normal(0, 0.3 * math.sqrt(1 - alike), (groups, size))
    true = predicted[:, None] * np.exp(common[:, None] + own)
    beliefs.observe([[(p, float(t)) for t in row] for p, row in zip(predicted.tolist(), true, strict=True)])
    beliefs.quantiles(np.ones(1))
    return beliefs


NARROW = learned(0.0)  # 1 and LONGEST are far from all that it believes of 4000


@pytest.mark.parametrize("alike", [0.3, 0.65, 0.9])
def test_how_alike_a_group_is_is_measured(alike: float) -> None:
    assert learned(alike).rho == pytest.approx(alike, abs=0.1)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000))
def test_chance_is_not_taken_for_likeness(seed: int) -> None:
    assert learned(0.0, seed=seed).rho < 0.1
    alone = Beliefs(LONGEST)
    alone.observe([[(1000.0, 1000.0 + seed + step)] for step in range(500)])
    alone.quantiles(np.ones(1))
    assert alone.rho == 0


def common_part(rho: float, done: list[float], floors: list[float]) -> tuple[float, float]:
    means, variances = [0.0] * (len(floors) + 1), [0.0] * (len(floors) + 1)
    common_parts(rho, (len(done), sum(done)), floors, means, variances)
    return means[-1], variances[-1]


@given(st.floats(0.05, 0.95), st.lists(st.floats(-2.4, 2.4), max_size=16))
def test_what_is_done_tells_as_much_as_the_formula_says(rho: float, done: list[float]) -> None:
    mean, variance = common_part(rho, done, [])
    count = len(done)
    whole = 1 + rho * (count - 1) if count else 1.0
    assert mean == pytest.approx(rho * sum(done) / whole)
    assert variance + 1 - rho == pytest.approx(1 - rho**2 * count / whole)


@given(
    st.floats(0.05, 0.95),
    st.lists(st.floats(-2.4, 2.4), max_size=4),
    st.lists(st.floats(-6, 6), min_size=1, max_size=8),
)
def test_what_is_longer_already_makes_the_others_longer_and_surer(
    rho: float, done: list[float], floors: list[float]
) -> None:
    before, after = common_part(rho, done, []), common_part(rho, done, floors)
    assert after[0] >= before[0]
    assert 0 < after[1] <= before[1] + 1e-9


def test_one_that_is_longer_already_tells_what_drawing_tells() -> None:
    rng, rho, floor = np.random.default_rng(0), 0.6, 1.0
    common = rng.normal(0, math.sqrt(rho), 400_000)
    kept = common[common + rng.normal(0, math.sqrt(1 - rho), len(common)) > floor]
    assert common_part(rho, [], [floor]) == pytest.approx((kept.mean(), kept.var()), rel=0.02)


def test_draws_of_a_group_come_out_together() -> None:
    beliefs = learned(0.65)
    samples = 64
    kin = Kin(
        np.repeat(np.arange(samples // 2), 2), np.zeros(samples), np.full(samples, math.sqrt(0.65)),
        np.full(samples, math.sqrt(0.35)),
    )  # fmt: skip
    draws = np.log(beliefs.draws(np.full(samples, 2000.0), 400, np.random.default_rng(0), kin))
    alike = [np.corrcoef(draws[:, k], draws[:, k + 1])[0, 1] for k in range(0, samples, 2)]
    others = [np.corrcoef(draws[:, k], draws[:, k + 2])[0, 1] for k in range(0, samples - 2, 2)]
    assert np.mean(alike) == pytest.approx(0.65, abs=0.08)
    assert abs(np.mean(others)) < 0.05


ALIKE = learned(0.65)
SEEN = st.tuples(st.sampled_from(["waits", "runs", "done"]), st.integers(1, LONGEST))  # and its tokens


def seen_so_far(groups: list[list[tuple[str, int]]]) -> tuple[GroupBeliefs, Board]:
    group_beliefs, board = GroupBeliefs(ALIKE), Board(now=0.0)
    generator = board.generators["a"] = BoardGenerator("a", 64, CURVE.table(64), 0.0)
    jobs = [group_of(number, 500.0 + 900 * (number % 3), len(group)) for number, group in enumerate(groups)]
    group_beliefs.admitted([job for group in jobs for job in group])
    for group, seen in zip(jobs, groups, strict=True):
        for job, (what, tokens) in zip(group, seen, strict=True):
            if what == "waits":
                board.waiting.add(job, group_beliefs.expected_length(job))
            elif what == "runs":
                board.start(generator, job, tokens)
        for job, (what, tokens) in zip(group, seen, strict=True):
            if what == "done":
                group_beliefs.finished(board, job, tokens)
    return group_beliefs, board


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(SEEN, min_size=1, max_size=6), min_size=1, max_size=5))
def test_many_groups_are_corrected_as_each_alone(groups: list[list[tuple[str, int]]]) -> None:
    (together, one_board), (alone, other_board) = seen_so_far(groups), seen_so_far(groups)
    together.look(one_board)
    alone._follow(together.drift)
    for group in list(alone._groups.values()):
        alone._correct(other_board, group)
    for key, one in alone._known.items():
        other = together._known[key]
        assert (other.mean, other.variance) == pytest.approx((one.mean, one.variance), rel=1e-9)
    orders = [
        [[key for _, key, _ in order] for order in b.waiting.by_turn()] for b in (one_board, other_board)
    ]
    assert orders[0] == orders[1]
    known = [one.job for one in alone._known.values()]
    assert not known or together.rows_of(known)[0] == pytest.approx(alone.rows_of(known)[0], rel=1e-9)


@pytest.mark.parametrize(("alike", "first"), [(0.9, 0), (0.0, 1)])
def test_what_waits_is_ranked_anew_when_one_of_its_group_is_done(alike: float, first: int) -> None:
    """Group 0 is predicted to be the shorter one; one of it is done and was three times as long."""
    dispatcher = Dispatcher(LongestFirst(GroupBeliefs(learned(alike))))
    dispatcher.join("a", 1, CURVE.table(1), 0.0)
    dispatcher.admit(group_of(0, 1000.0, 3), 0.0)
    dispatcher.turn(0.0)
    dispatcher.admit(group_of(1, 1100.0, 3), 0.0)
    dispatcher.finished((0, 2), 3000, 20.0)
    assert [job.key[0] for job in dispatcher.turn(20.0)["a"]] == [first]


def test_one_that_runs_for_long_makes_the_waiting_of_its_group_longer() -> None:
    group_beliefs = GroupBeliefs(learned(0.9))
    board = Board()
    jobs = group_of(0, 1000.0, 3)
    group_beliefs.admitted(jobs)
    generator = board.generators["a"] = BoardGenerator("a", 1, CURVE.table(1), 0.0)
    board.start(generator, jobs[0])
    for job in jobs[1:]:
        board.waiting.add(job, group_beliefs.expected_length(job))
    group_beliefs.look(board)
    assert group_beliefs.expected_length(jobs[1]) == 1000.0
    generator.advance(1600 * float(CURVE.table(1)[1]))
    group_beliefs.look(board)
    assert group_beliefs.expected_length(jobs[1]) > 1400
    assert (jobs[1], group_beliefs.expected_length(jobs[1])) in list(board.waiting)


def test_a_ranker_that_is_wrong_as_never_before_is_doubted_and_costs_little() -> None:
    """A fifth of the samples was ranked the wrong way round, by a ranker that was good until now."""
    rng = np.random.default_rng(2)
    lengths = paper_lengths(1536, LONGEST, rng)
    predicted = lengths * np.exp(rng.normal(0, 0.25, len(lengths)))
    now = lengths[:512]
    inverted = np.sort(now)[::-1][np.argsort(np.argsort(now))]
    jobs = [
        group_of(number, float(wrong if rng.random() < 0.2 else right), 1)[0]
        for number, (right, wrong) in enumerate(zip(predicted[:512], inverted, strict=True))
    ]
    truth = {job.key: int(length) for job, length in zip(jobs, now, strict=True)}
    tables = [CURVE.table(128)] * 4

    def ours(*, corrects: bool, **options: Any) -> float:
        beliefs = Beliefs(LONGEST)
        beliefs.observe([[pair] for pair in zip(predicted[512:], lengths[512:], strict=True)])
        policy = DeadlinePolicy(GroupBeliefs(beliefs, corrects=corrects), **options)
        seconds = generate(jobs, truth, tables, policy, thinking=False)
        assert (policy.group_beliefs.drift.wild > 0.05) is corrects
        return seconds

    simple = generate(jobs, truth, tables, LongestFirst())
    trusting, doubting = ours(corrects=False), ours(corrects=True, replans=8, moves="always")
    assert trusting > 1.15 * simple, "else this shows nothing"
    assert doubting < 1.08 * simple


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([1, 4000, LONGEST]), min_size=1, max_size=8))
def test_samples_end_however_wrong_the_ranker_was(lengths: list[int]) -> None:
    """To the last one, when there is nobody left of whom something else could be believed."""
    group_beliefs, jobs = GroupBeliefs(NARROW), group_of(0, 4000.0, len(lengths))
    group_beliefs.admitted(jobs)
    board = Board()
    for job, length in zip(jobs, lengths, strict=True):
        assert set(group_beliefs.finished(board, job, length)) <= set(group_beliefs.row)
    assert not group_beliefs.row


def test_many_move_where_one_has_all_and_others_have_nothing() -> None:
    board, group_beliefs = Board(), GroupBeliefs(learned(0.0))
    jobs = [group_of(number, 4000.0, 1)[0] for number in range(64)]
    group_beliefs.admitted(jobs)
    for name in "abcd":
        board.generators[name] = BoardGenerator(name, 64, CURVE.table(64), 0.0)
    for job in jobs:
        board.start(board.generators["b"], job, 100.0)
    state = state_of(board, group_beliefs, 0.0)
    draws = group_beliefs.beliefs.draws(state.predicted, 8, np.random.default_rng(0))
    before = state.expected(draws, LONGEST_FIRST)
    moves, _, after = find_moves(state, draws, LONGEST_FIRST)
    assert after < 0.9 * before
    assert np.ptp(state.batch()) <= 5
    assert len(moves) == len({row for row, _ in moves})


def test_nothing_moves_where_moving_costs_more_than_it_gains() -> None:
    board, group_beliefs = Board(), GroupBeliefs(learned(0.0))
    jobs = [group_of(number, 4000.0, 1)[0] for number in range(8)]
    group_beliefs.admitted(jobs)
    for name in "ab":
        board.generators[name] = BoardGenerator(name, 8, CURVE.table(8), 0.0)
    for job in jobs:
        board.start(board.generators["a"], job, 3000.0)
    state = state_of(board, group_beliefs, 0.0)
    draws = np.maximum(group_beliefs.beliefs.draws(state.predicted, 8, np.random.default_rng(0)), 3001.0)
    state.prefill_s[:] = 0.1
    moves, _, _ = find_moves(state, draws, LONGEST_FIRST)
    assert not moves
    assert not state.stalls.any()
