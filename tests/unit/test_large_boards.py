"""Large fleets: plans are judged by a part of the board, and chosen beside the dispatcher, which deals on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from producers.dispatch import dispatcher as dispatcher_module
from producers.dispatch import state
from producers.dispatch.beliefs import LEVELS, Beliefs
from producers.dispatch.board import NO_DEADLINE
from producers.dispatch.choosers import InThread
from producers.dispatch.deadline import DeadlinePolicy, DeadlineRule, Why
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.makespan import declared, makespan
from producers.dispatch.state import ChosenJobs, chosen_jobs, table_of
from tests.bench._lengths import CURVE, paper_lengths
from tests.unit.test_dispatch import LONGEST, drawn, job
from tests.waiting import wait_until


class Later:
    """Makes choices when the test says so."""

    wakes_at = float("inf")

    def __init__(self) -> None:
        self.work: Callable[[], Any] | None = None
        self.ready = False

    def begin(self, work: Callable[[], Any], now: float) -> None:
        assert self.work is None
        self.work = work

    def take(self, now: float) -> tuple[Any, float] | None:
        if self.work is None or not self.ready:
            return None
        work, self.work, self.ready = self.work, None, False
        return work(), 0.5

    def rests(self, now: float) -> bool:
        return False


def dispatching(
    policy: DeadlinePolicy, jobs: list[SampleJob], generators: int, slots: int = 16
) -> Dispatcher:
    dispatcher = Dispatcher(policy)
    for number in range(generators):
        table = CURVE.scaled(1.0 + number % 2).table(slots if number % 4 < 2 else 2 * slots)
        dispatcher.join(f"g{number:03d}", len(table) - 1, table, 0.0)
    dispatcher.admit(jobs, 0.0)
    return dispatcher


def large(seed: int, generators: int, samples: int) -> tuple[Dispatcher, DeadlinePolicy, np.ndarray]:
    """A board of which only a part is looked at, and the true lengths."""
    lengths, predicted, beliefs = drawn(seed, samples)
    policy = DeadlinePolicy(GroupBeliefs(beliefs), seed=seed)
    jobs = [job(number, float(length)) for number, length in enumerate(predicted)]
    return dispatching(policy, jobs, generators), policy, lengths


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a board of some hundred samples counts as large."""
    monkeypatch.setattr(state, "_MOST_WORK", 40_000.0)
    yield


def scaled_and_full(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> tuple[ChosenJobs, ChosenJobs]:
    board = dispatcher._board
    some = chosen_jobs(board, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(state, "_MOST_WORK", 1e12)
        return some, chosen_jobs(board, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_part_of_the_board_is_like_the_board(
    seed: int, little_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, policy, _ = large(seed, generators=64, samples=2048)
    policy.plan = DeadlineRule(0.5, NO_DEADLINE, 0.0)
    policy._came = False  # so that no choice is made, and all is dealt longest first
    for generator, key in list(zip(dispatcher._board.fastest_first * 8, range(512), strict=True)):
        dispatcher._board.start(generator, dispatcher._board.waiting.remove((key, 0)), tokens=float(key))
    some, every = scaled_and_full(dispatcher, monkeypatch)
    assert every.are_all and not some.are_all and every.scale == 1.0
    assert some.work <= 40_000 * 1.1 and len(some.generators) >= 4
    assert len(some.jobs) * some.scale == pytest.approx(2048, rel=1e-6)
    for share in (  # of a kind of generators, of running jobs, and of their tokens
        lambda chosen: np.mean([one.slots for one in chosen.generators]),
        lambda chosen: np.mean([one.seconds[1] for one in chosen.generators]),
        lambda chosen: np.mean([place >= 0 for _, place, _ in chosen.jobs]),
        lambda chosen: np.mean([one.prompt.predicted for one, place, _ in chosen.jobs if place < 0]),
    ):
        assert share(some) == pytest.approx(share(every), rel=0.1)
    longest = max(one.prompt.predicted for one, place, _ in every.jobs if place < 0)
    assert longest in [one.prompt.predicted for one, _, _ in some.jobs], "it may be the last to end"


def test_a_row_stands_for_several_slots_if_few_generators_have_too_much(
    little_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, policy, _ = large(0, generators=8, samples=4000)
    some, _ = scaled_and_full(dispatcher, monkeypatch)
    table = table_of(some, policy.group_beliefs)
    assert some.each > 1 and some.work <= 40_000 * 1.1
    assert sum(table.slots) * some.each == pytest.approx(sum(one.slots for one in some.generators), rel=0.2)
    for row, generator in zip(table.tables, some.generators, strict=True):
        assert row[1] == generator.seconds[some.each]


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_was_chosen_by_a_part_is_about_as_good(
    seed: int, little_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the compiled run of both plans on the whole board, with the true lengths."""
    dispatcher, policy, lengths = large(seed, generators=32, samples=1024)
    some, every = scaled_and_full(dispatcher, monkeypatch)
    assert not some.are_all
    whole = table_of(every, policy.group_beliefs)
    ends = []
    for chosen in (some, every):
        (plan, _) = policy._best(table_of(chosen, policy.group_beliefs), 0.0, again=False, moves=False)
        rows = whole.beliefs
        told = np.array([declared(row, 0.0, plan.quantile) for row in rows])
        true = np.array([float(lengths[key[0]]) for key in whole.keys])
        ends.append(
            makespan(
                true, rows, told, whole.order, whole.where, whole.tokens, whole.tables, whole.slots,
                whole.stalls, plan.quantile, plan.deadline,
            )[0]
        )  # fmt: skip
    assert ends[0] <= 1.08 * ends[1], ends


def test_while_a_plan_is_chosen_the_longest_begin_and_the_others_wait_for_it() -> None:
    _, predicted, beliefs = drawn(7, 256)
    jobs = [job(number, float(length)) for number, length in enumerate(predicted)]
    later = Later()
    policy = DeadlinePolicy(GroupBeliefs(beliefs), thrift=0.5, chooser=later)
    dispatcher = dispatching(policy, jobs, generators=16)
    given = dispatcher.turn(0.0)
    longest = sorted(predicted)[-2:]
    assert sorted(one.prompt.predicted for some in given.values() for one in some) == longest
    assert not dispatcher.turn(0.2) and policy.why is Why.NOTHING
    later.ready = True
    given = dispatcher.turn(0.4)
    assert policy.why is Why.CHOSEN and given
    assert policy.plan is not None and policy.plan.ends > 0.4
    if policy.by_deadline:
        assert policy.plan.deadline - policy.plan.ends < 200, "both are counted from when all began"


def test_nobody_waits_for_a_plan_for_more_than_a_second() -> None:
    _, predicted, beliefs = drawn(8, 256)
    jobs = [job(number, float(length)) for number, length in enumerate(predicted)]
    later = Later()
    policy = DeadlinePolicy(GroupBeliefs(beliefs), thrift=0.5, chooser=later)
    dispatcher = dispatching(policy, jobs, generators=16)
    dispatcher.turn(0.0)
    assert 0.0 < dispatcher.wakes_at <= 1.0
    assert sum(map(len, dispatcher.turn(1.0).values())) == 254, "the rest, the longest first"
    later.ready = True
    dispatcher.finished(jobs[0].key, 5, 2.0)
    dispatcher.turn(2.0)
    assert policy.why is Why.CHOSEN, "it rules what comes later"


def test_a_busy_fleet_waits_for_no_plan() -> None:
    """Few slots are free: they get the longest at once."""
    _, predicted, beliefs = drawn(9, 1024)
    jobs = [job(number, float(length)) for number, length in enumerate(predicted)]
    later = Later()
    policy = DeadlinePolicy(GroupBeliefs(beliefs), thrift=0.5, chooser=later)
    dispatcher = dispatching(policy, jobs[:800], generators=16)
    dispatcher.turn(0.0)
    dispatcher.turn(1.0)
    later.ready = True
    dispatcher.turn(2.0)
    policy.plan = DeadlineRule(0.5, NO_DEADLINE, 2.0)
    full = dispatcher.given
    dispatcher.admit(jobs[800:], 3.0)
    dispatcher.turn(3.0)
    done = next(iter(dispatcher._home))
    dispatcher.finished(done, 5, 4.0)
    dispatcher.turn(4.0)
    assert later.work is not None and dispatcher.given >= full


def test_very_many_jobs_are_dealt_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "_FIRST_GIVEN", 32)
    monkeypatch.setattr(dispatcher_module, "_MOST_GIVEN", 64)
    _, predicted, _ = drawn(10, 400)
    jobs = [job(number, float(length)) for number, length in enumerate(predicted)]
    dispatcher = dispatching(DeadlinePolicy(GroupBeliefs(Beliefs(LONGEST))), jobs, generators=16)
    counts, order = [], []
    while dispatcher.waiting:
        given = [one for some in dispatcher.turn(0.0).values() for one in some]
        counts.append(len(given))
        order.append({one.prompt.predicted for one in given})
        assert dispatcher.has_more is (sum(counts) < 384 and dispatcher.waiting > 0)
        if not dispatcher.has_more:
            break
    assert counts == [32, 64, 64, 64, 64, 64, 32]
    assert all(min(one) >= max(two) for one, two in pairwise(order)), "the longest first"


def test_a_thread_makes_the_choice_and_rests_after_it() -> None:
    go, chooser = threading.Event(), InThread[int]()

    def work() -> int:
        go.wait(20)
        return 7

    chooser.begin(work, 0.0)
    assert chooser.take(0.0) is None and not chooser.rests(0.0)
    go.set()
    found: list[tuple[int, float]] = []
    wait_until(lambda: found.append(one) or True if (one := chooser.take(1.0)) else False, what="its result")
    assert found[0][0] == 7 and chooser.take(1.0) is None
    assert chooser.rests(1.0 + found[0][1]) and not chooser.rests(1.0 + 5 * found[0][1])


def test_what_goes_wrong_in_that_thread_is_heard() -> None:
    chooser = InThread[int]()

    def fails() -> int:
        raise RuntimeError("no plan")

    chooser.begin(fails, 0.0)
    with pytest.raises(RuntimeError, match="no plan"):
        wait_until(lambda: chooser.take(0.0), what="its failure", deadline_s=20)


def test_corrected_beliefs_are_read_as_numpy_does() -> None:
    """The compiled reading of priors, and that for one number, against `np.interp`."""
    from producers.dispatch import group_beliefs as module

    lengths = paper_lengths(len(LEVELS), LONGEST, np.random.default_rng(0))
    prior = np.sort(np.concatenate([lengths[4:], lengths[4:8]]).astype(float))  # some are equal
    for length in (*prior.tolist(), 0.0, 1.0, 3333.3, 1e9):
        assert module._score(prior, length) == pytest.approx(np.interp(length, prior, LEVELS))
    for score in (*np.linspace(-4, 4, 41).tolist(), *LEVELS.tolist()):
        assert module._length(prior, score) == pytest.approx(np.interp(score, LEVELS, prior))
    beliefs = GroupBeliefs(Beliefs(LONGEST))
    jobs = [job(0, 1000.0, index) for index in range(3)]
    beliefs.admitted(jobs)
    beliefs._known[jobs[1].key].mean, beliefs._known[jobs[1].key].variance = 0.7, 0.2
    rows, factors, _ = beliefs.rows_of(jobs)
    for one, row, factor in zip(jobs, rows, factors, strict=True):
        assert row == pytest.approx(beliefs.row[one.key])
        assert 1000.0 * factor == pytest.approx(beliefs.expected_length(one))
        assert beliefs.declared([one.key], [500.0], 0.9) == [pytest.approx(declared(row, 500.0, 0.9))]
