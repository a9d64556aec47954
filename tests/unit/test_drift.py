"""How far off all predictions are: what is done tells, and what runs for longer than was believed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra import choices
from producers.dispatch import drift_sums
from producers.dispatch.beliefs import ENOUGH, KEPT_PAIRS, Beliefs
from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.drift import Drift
from producers.dispatch.drift_seen import SHIFTS, WILD, SeenLengths, drift_of
from producers.dispatch.drift_sums import likelihoods, summed_logs
from producers.dispatch.group_beliefs import GroupBeliefs
from tests.bench._lengths import CURVE
from tests.unit.test_ranks import group_of

LONGEST = 32_768
SIGMA = 0.25


def known(seed: int = 0, count: int = KEPT_PAIRS) -> Beliefs:
    """Of a ranker that errs log-normally, about lengths that do."""
    rng = np.random.default_rng(seed)
    true = rng.lognormal(8.0, 0.7, count)
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[pair] for pair in zip(true * np.exp(rng.normal(0, SIGMA, count)), true, strict=True)])
    beliefs.quantiles(np.ones(1))
    return beliefs


KNOWN = known()


def seen(count: int, shift: float, *, done: bool, wild: float = 0.0, seed: int = 0) -> SeenLengths:
    """Samples that are `shift` longer than they should be; of those that run, a third of the tokens."""
    rng = np.random.default_rng([seed, count])
    true = rng.lognormal(8.0, 0.7, count)
    said = np.where(rng.random(count) < wild, rng.permutation(true), true)
    predicted = said * np.exp(rng.normal(0, SIGMA, count) - shift)
    if done:
        return SeenLengths(predicted, true, np.ones(count, bool), np.ones(count))
    tokens = np.full(count, np.quantile(true, 1 / 3))
    running = true > tokens
    return SeenLengths(predicted, np.where(running, tokens, true), ~running, np.ones(count))


def test_a_drift_that_is_only_possible_is_not_followed() -> None:
    assert drift_of(KNOWN, seen(0, 0.0, done=True)) == Drift()
    few = seen(20, 0.0, done=False)
    assert drift_of(KNOWN, few) == Drift()
    running = SeenLengths(few.predicted, np.ones(20), np.zeros(20, bool), few.weight)
    assert drift_of(KNOWN, running) == Drift()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("shift", [-0.7, -0.3, 0.0, 0.3, 0.7])
def test_a_common_factor_is_found(shift: float, done: bool, seed: int) -> None:
    samples = seen(300, shift, done=done, seed=seed)
    found = drift_of(KNOWN, samples)
    assert found.wild < 0.1
    true = seen(300, shift, done=True, seed=seed).tokens
    rows = KNOWN.drifted(samples.predicted, found)
    assert np.log(true / np.median(rows, axis=1)).mean() == pytest.approx(0, abs=0.12)


@pytest.mark.parametrize("of_predictions", [True, False])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_ranker_that_says_half_is_told_from_a_policy_that_writes_twice_as_much(
    factor: float, of_predictions: bool
) -> None:
    """The longest samples tell: with the same policy, there are none that are longer than before."""
    rng = np.random.default_rng(5)
    beliefs = Beliefs(LONGEST)

    def lengths(count: int) -> np.ndarray:
        return np.where(rng.random(count) < 0.3, rng.normal(9000, 500, count), rng.normal(1500, 200, count))

    before, now = lengths(KEPT_PAIRS), lengths(400)
    noise = np.exp(rng.normal(0, SIGMA, KEPT_PAIRS + len(now)))
    beliefs.observe([[pair] for pair in zip(before * noise[:KEPT_PAIRS], before, strict=True)])
    true, predicted = now, now * noise[KEPT_PAIRS:]
    if of_predictions:
        predicted = predicted / factor
    else:
        true = true * factor
    found = drift_of(beliefs, SeenLengths(predicted, true, np.ones(400, bool), np.ones(400)))
    assert found.of_predictions is of_predictions
    assert found.shift == pytest.approx(np.log(factor), abs=0.15)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_a_share_of_nonsense_is_found(share: float) -> None:
    found = drift_of(KNOWN, seen(1000, 0.0, done=True, wild=share))
    assert found.wild == pytest.approx(share, rel=0.5)
    assert abs(found.shift) < 0.08


@pytest.mark.parametrize("predicted", [500.0, 3000.0, 20_000.0])
@pytest.mark.parametrize("tokens", [1.0, 150.0, 600.0, 3000.0, 9000.0, 1e9])
@pytest.mark.parametrize("done", [True, False])
def test_one_sample_convinces_nobody(predicted: float, tokens: float, done: bool) -> None:
    one = SeenLengths(np.array([predicted]), np.array([tokens]), np.array([done]), np.ones(1))
    found = drift_of(KNOWN, one)
    assert abs(found.shift) <= max(0.1, 2 * found.error), "two standard errors: it may be nothing"


def test_very_many_samples_tell_the_same_as_some() -> None:
    few, many = drift_of(KNOWN, seen(4096, 0.4, done=True)), drift_of(KNOWN, seen(100_000, 0.4, done=True))
    assert few.shift == pytest.approx(many.shift, abs=0.03)


def test_beliefs_follow_as_soon_as_samples_run_for_longer_than_was_said() -> None:
    group_beliefs, board = GroupBeliefs(known()), Board()
    table = CURVE.table(64)
    generator = board.generators["a"] = BoardGenerator("a", 64, table, 0.0)
    jobs = [group_of(number, 400.0 + 5 * number, 1)[0] for number in range(64)]
    group_beliefs.admitted(jobs)
    before = np.median(group_beliefs.row[jobs[0].key])
    for job in jobs:
        board.start(generator, job)
    assert not group_beliefs.drift_seen(board).differs(Drift())
    generator.advance(1000 * float(table[64]))
    assert group_beliefs.drift_seen(board).differs(Drift())
    group_beliefs.look(board)
    assert group_beliefs.drift.shift > 0.4
    assert np.median(group_beliefs.row[jobs[0].key]) > 1.4 * before
    group_beliefs.admitted([group_of(100, 400.0, 1)[0]])
    assert group_beliefs.drift == Drift(), "the next samples may be as they used to be"


@pytest.mark.skipif(not choices.compiles(), reason="nothing is compiled")
@pytest.mark.parametrize("moves_bin", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_compiled_sums_are_those_of_numpy(
    seed: int, moves_bin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    rows = 300
    below, said = np.sort(rng.random((8, 41)), axis=1), rng.normal(5, 1, rows)
    logs, done, weight = said + rng.normal(0, 0.5, rows), rng.random(rows) < 0.5, rng.choice([0.2, 0.7], rows)
    any_length = rng.random(rows)

    def sums() -> tuple[np.ndarray, np.ndarray]:
        own = likelihoods(below, (4.0, 6.0), 0.1, said, logs, done, SHIFTS, moves_bin)
        return own, summed_logs(own, any_length, weight, WILD, 1e-3)

    compiled = sums()
    monkeypatch.setattr(drift_sums, "_COMPILED", False)
    for one, other in zip(compiled, sums(), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


def test_what_is_alike_is_believed_to_be_alike() -> None:
    """All answers are about as long, and predictions are noise: beliefs are as narrow as the answers."""
    rng = np.random.default_rng(0)
    true = rng.normal(5000, 400, KEPT_PAIRS)
    predicted = true * np.exp(rng.normal(0, SIGMA, KEPT_PAIRS))
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[pair] for pair in zip(predicted, true, strict=True)])
    rows = beliefs.quantiles(np.quantile(predicted, [0.05, 0.5, 0.95]))
    spread = np.log(rows[:, -4] / rows[:, 3]) / np.log(np.quantile(true, 0.95) / np.quantile(true, 0.05))
    assert spread.max() < 1.5
    assert rows.max() <= true.max(), "nothing so long was ever seen"


def test_few_pairs_are_not_believed() -> None:
    assert not known(count=ENOUGH - 1).are_known
    assert known(count=ENOUGH).are_known
    assert math.isclose(known(count=ENOUGH).rho, 0.0)


@settings(max_examples=30, deadline=None)
@given(
    predicted=st.floats(300, 20_000),
    share=st.floats(0, 2),
    shift=st.floats(-0.7, 0.7),
    wild=st.sampled_from([0.0, 0.1, 0.4]),
    of_predictions=st.booleans(),
)
def test_lengths_of_running_samples_are_drawn_from_what_is_left(
    predicted: float, share: float, shift: float, wild: float, of_predictions: bool
) -> None:
    """They come out as if all lengths were drawn, and those dropped that are not longer."""
    rng, tokens = np.random.default_rng(3), predicted * share
    drift = Drift(shift, 0.0, wild, of_predictions)
    drawn = KNOWN.draws(np.full(1000, predicted), 20, rng, drift=drift)
    left = np.sort(drawn[drawn > tokens])
    given_up = KNOWN.outlasting(
        np.full(4000, predicted), np.full(4000, tokens), rng, (np.zeros(4000), np.ones(4000)), drift
    )
    if len(left) < 200:
        return  # too few to compare with
    # so many errors of a quantile's share are the most that chance makes
    error = 4 * (0.5 / np.sqrt(len(left)) + 0.5 / np.sqrt(4000)) + 0.01
    for level in (0.1, 0.5, 0.9):
        length = np.quantile(given_up, level)
        assert np.mean(left < length * 0.99) - error <= level <= np.mean(left <= length * 1.01) + error


def test_the_scores_of_a_group_count_for_what_is_left() -> None:
    rng, count = np.random.default_rng(0), 2000
    args = np.full(count, 3000.0), np.full(count, 2500.0), rng
    alone, longer = (
        np.median(KNOWN.outlasting(*args, (np.full(count, mean), np.full(count, 0.6)))) for mean in (0.0, 1.0)
    )
    assert longer > 1.1 * alone
