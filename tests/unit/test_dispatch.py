"""Dispatch: curves, beliefs, the dispatcher's bookkeeping, and plans that are carried out as reckoned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch.beliefs import Beliefs
from producers.dispatch.curve import CurveError, LatencyCurve
from producers.dispatch.deadline import DeadlinePolicy, MovesWhere
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.makespan import declared, makespan
from producers.dispatch.policies.algorithm2_policy import Algorithm2
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.policies.policy import Policy
from producers.dispatch.policies.random_policy import RandomFifo
from producers.dispatch.policies.round_robin_policy import RoundRobin
from producers.engines.engine import SampleRequest
from producers.engines.without_model import ReplayEngine, VirtualClock
from schemas.messages import TRAIN, Prompt
from tests.bench._lengths import CURVE, bound, paper_lengths
from tests.bench._virtual import PREFILL_S, Span, generate

LONGEST = 20_000


def job(group: int, predicted: float, index: int = 0, iteration: int = 0) -> SampleJob:
    prompt = Prompt(
        run="r", purpose=TRAIN, group=group, size=1, problem_id=str(group), problem="{}", epoch=0,
        tokens=np.zeros(0, np.int32), iteration=iteration, mini=0, bundle=group, bundle_groups=1,
        min_version=iteration, predicted=predicted, predictor="", length_class=0, edges=[], admitted_at=0.0,
    )  # fmt: skip
    return SampleJob(prompt, index)


def drawn(seed: int, count: int = 96, sigma: float = 0.25) -> tuple[np.ndarray, np.ndarray, Beliefs]:
    """True lengths, predicted ones, and what such predictions were worth before."""
    rng = np.random.default_rng(seed)
    lengths = paper_lengths(count + 1024, LONGEST, rng)
    predicted = lengths * np.exp(rng.normal(0, sigma, len(lengths)))
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[pair] for pair in zip(predicted[count:], lengths[count:], strict=True)])
    return lengths[:count], predicted[:count], beliefs


def policies(beliefs: Beliefs) -> list[Policy]:
    return [
        RandomFifo(0), RoundRobin(), LongestFirst(), Algorithm2(), DeadlinePolicy(GroupBeliefs(beliefs)),
        DeadlinePolicy(GroupBeliefs(beliefs), replans=4),
        DeadlinePolicy(GroupBeliefs(beliefs), replans=8, moves="always", prefill_s=1e-5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("batches", "seconds"),
    [
        ((), ()),
        ((1, 2), (0.1,)),
        ((2, 1), (0.1, 0.2)),
        ((0, 1), (0.1, 0.2)),
        ((1,), (-1.0,)),
        ((1,), (np.nan,)),
    ],
)
def test_a_curve_that_no_engine_can_have_is_refused(batches: Any, seconds: Any) -> None:
    with pytest.raises(CurveError):
        LatencyCurve(batches, seconds)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8), st.integers(1, 300))
def test_a_table_never_falls_and_goes_through_the_first_point(seconds: list[float], slots: int) -> None:
    table = LatencyCurve(tuple(2**k for k in range(len(seconds))), tuple(seconds)).table(slots)
    assert len(table) == slots + 1
    assert np.all(np.diff(table) >= 0)
    assert table[1] == pytest.approx(seconds[0])


def test_beliefs_are_as_wide_as_the_errors_were() -> None:
    lengths, predicted, beliefs = drawn(1, count=2000)
    quantiles = beliefs.quantiles(predicted)
    assert np.all(np.diff(quantiles, axis=1) >= 0)
    for place, share in ((6, 6.5 / 64), (32, 32.5 / 64), (57, 57.5 / 64)):
        assert np.mean(lengths <= quantiles[:, place]) == pytest.approx(share, abs=0.04)
    draws = beliefs.draws(predicted, 16, np.random.default_rng(0))
    assert draws.min() >= 1
    assert draws.max() <= LONGEST
    assert np.mean(draws < lengths) == pytest.approx(0.5, abs=0.03)


def test_nothing_known_is_not_taken_for_exact_and_true_predictions_are() -> None:
    unknown = Beliefs(LONGEST)
    row = unknown.quantiles(np.array([1000.0]))[0]
    assert not unknown.exact
    assert row[0] < 500 < 2000 < row[-1]
    exact = Beliefs(LONGEST)
    exact.observe([[(float(length), float(length))] for length in range(100, 1000)])
    assert exact.exact
    assert exact.quantiles(np.array([777.0]))[0] == pytest.approx(777.0)


def test_wrong_ranks_make_beliefs_with_two_humps() -> None:
    """A fifth of the long ones was taken for short: a short prediction may mean either."""
    rng = np.random.default_rng(0)
    beliefs = Beliefs(LONGEST)
    true = np.where(rng.random(2000) < 0.2, 10_000.0, 1000.0)
    beliefs.observe([[(1000.0, length)] for length in true])
    row = beliefs.quantiles(np.array([1000.0]))[0]
    assert np.mean(row > 5000) == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize(("generators", "slots"), [(1, 8), (3, 4), (4, 64)])
def test_every_policy_makes_every_sample_and_none_beats_the_bound(
    number: int, generators: int, slots: int
) -> None:
    lengths, predicted, beliefs = drawn(3)
    jobs = [job(group, float(length)) for group, length in enumerate(predicted)]
    truth = {one.key: int(length) for one, length in zip(jobs, lengths, strict=True)}
    tables = [CURVE.table(slots)] * generators
    seconds = generate(jobs, truth, tables, policies(beliefs)[number], thinking=False)
    assert seconds >= bound(lengths.tolist(), tables) * 0.999


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(2, 8), (3, 16), (4, 64)]), st.sampled_from([1, 4]))
def test_a_plan_is_carried_out_as_it_was_reckoned(seed: int, shape: tuple[int, int], size: int) -> None:
    """The compiled run of a plan and the dispatcher's own, step by step, end at the same moment.

    In groups too, as long as nothing is learned on the way.
    """
    lengths, predicted, beliefs = drawn(seed)
    predicted = np.repeat(predicted[::size], size)
    jobs = [job(place // size, float(length), place % size) for place, length in enumerate(predicted)]
    truth = {one.key: int(length) for one, length in zip(jobs, lengths, strict=True)}
    tables = [CURVE.table(shape[1])] * shape[0]
    policy = DeadlinePolicy(GroupBeliefs(beliefs, corrects=False), seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("producers.dispatch.deadline._PROBES", 0)  # probes are no part of a plan
        seconds = generate(jobs, truth, tables, policy, thinking=False)
    plan = policy.plan
    assert plan is not None
    rows = beliefs.quantiles(predicted)
    reckoned, _ = makespan(
        lengths.astype(float), rows, np.array([declared(row, 0.0, plan.quantile) for row in rows]),
        np.argsort(predicted, kind="stable"),
        np.full(len(jobs), -1), np.zeros(len(jobs)), np.stack(tables), np.full(shape[0], shape[1]),
        np.zeros(shape[0]), plan.quantile, plan.deadline,
    )  # fmt: skip
    assert seconds == pytest.approx(reckoned, rel=1e-3)


def test_true_lengths_come_close_to_the_bound_and_beat_longest_first() -> None:
    rng = np.random.default_rng(0)
    lengths = paper_lengths(1024, LONGEST, rng)
    jobs = [job(group, float(length)) for group, length in enumerate(lengths)]
    truth = {one.key: int(length) for one, length in zip(jobs, lengths, strict=True)}
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[(float(length), float(length))] for length in lengths])
    tables = [CURVE.table(256)] * 8
    ours = generate(jobs, truth, tables, DeadlinePolicy(GroupBeliefs(beliefs)), thinking=False)
    assert ours <= 1.04 * bound(lengths.tolist(), tables)
    assert ours <= 0.9 * generate(jobs, truth, tables, LongestFirst())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_instances_come_and_go_and_each_job_is_given_to_one_at_a_time(data: st.DataObject) -> None:
    """Joins, deaths and samples in any order: nothing is lost, and nothing has two homes."""
    _, predicted, beliefs = drawn(5, count=24)
    number = data.draw(st.integers(0, 6))
    dispatcher = Dispatcher(policies(beliefs)[number], latency_s=data.draw(st.sampled_from([0.0, 0.1])))
    jobs = [job(group, float(length)) for group, length in enumerate(predicted)]
    home: dict[tuple[int, int], str] = {}
    done: set[tuple[int, int]] = set()
    now, names = 0.0, iter(range(1000))
    dispatcher.admit(jobs[:12], now)
    admitted = {one.key for one in jobs[:12]}  # what comes of other groups anyone could have made up
    for event in data.draw(
        st.lists(st.sampled_from(["join", "leave", "finish", "admit", "late", "withdraw"]), max_size=60)
    ):
        now += 1.0
        alive = list(dispatcher.generators)
        if event == "join" and len(alive) < 4:
            dispatcher.join(f"g{next(names)}", 3, CURVE.table(3), now)
        elif event == "leave" and alive:
            gone = data.draw(st.sampled_from(alive))
            assert dispatcher.leave(gone, now) == sum(name == gone for name in home.values())
            home = {key: name for key, name in home.items() if name != gone}
        elif event == "finish" and home:
            key = data.draw(st.sampled_from(sorted(home)))
            del home[key]
            done.add(key)
            dispatcher.finished(key, 100, now)
        elif event == "admit":
            dispatcher.admit(jobs, now)
            admitted = {one.key for one in jobs}
        elif event == "withdraw":
            for name, keys in dispatcher.withdraw().items():
                assert all(home[key] == name for key in keys)
                back = [key for key in keys if data.draw(st.booleans())]
                for key in back:
                    del home[key]
                dispatcher.returned(name, back, now)
        elif event == "late":  # of a generator that was thought dead
            key = data.draw(st.sampled_from(sorted(admitted)))
            home.pop(key, None)
            done.add(key)
            dispatcher.finished(key, 100, now)
        for name, given_ in dispatcher.turn(now).items():
            for one in given_:
                assert one.key not in home
                assert one.key not in done
                home[one.key] = name
        if dispatcher.generators and dispatcher.waiting:
            assert home, "jobs wait, and nobody works"
    dispatcher.admit(jobs, now)
    if not dispatcher.generators:
        dispatcher.join("last", 3, CURVE.table(3), now)
    for _ in range(200):
        now += 1.0
        for name, given_ in dispatcher.turn(now).items():
            home.update((one.key, name) for one in given_)
        for key in list(home):
            done.add(key)
            del home[key]
            dispatcher.finished(key, 100, now)
    assert done == {one.key for one in jobs}


@pytest.mark.parametrize(("round_s", "gap_s"), [(0.0, 0.15), (0.5, 0.5)])
@pytest.mark.parametrize("length", [5, 40])
def test_a_generator_gets_ahead_what_it_finishes_until_more_can_come(
    round_s: float, gap_s: float, length: int
) -> None:
    """However short its samples are, and however far it is; at once when more samples are admitted."""
    step_s, slots = 0.01, 8
    dispatcher = Dispatcher(LongestFirst(), latency_s=0.15)
    for name in ("a", "b"):
        dispatcher.join(name, slots, np.full(slots + 1, step_s), 0.0)
        dispatcher.delayed(name, round_s)
    has: dict[str, list[Any]] = {"a": [], "b": []}
    for first, now in ((0, 0.0), (1000, 60.0)):
        dispatcher.admit([job(group, 10.0) for group in range(first, first + 1000)], now)
        for name, jobs in dispatcher.turn(now).items():
            has[name] += jobs
        if first:
            break
        while any(has.values()):
            for jobs in has.values():
                dispatcher.finished(jobs.pop(0).key, length, now)
            for name, jobs in dispatcher.turn(now).items():
                has[name] += jobs
    needed = slots * gap_s / (length * step_s)
    for jobs in has.values():
        assert needed <= len(jobs) - slots <= 1.5 * needed + 2


def test_no_generator_gets_more_ahead_than_it_could_need() -> None:
    """Whatever it says of its speed and of the age of its jobs."""
    dispatcher, slots = Dispatcher(LongestFirst(), latency_s=0.15), 8
    for name in ("a", "b"):
        dispatcher.join(name, slots, np.full(slots + 1, 1e-9), 0.0)
        dispatcher.delayed(name, 1e9)
    dispatcher.admit([job(group, 10.0) for group in range(2000)], 0.0)
    has = dispatcher.turn(0.0)
    for jobs in has.values():
        dispatcher.finished(jobs[0].key, 1, 0.0)
    assert all(len(jobs) <= 20 * slots for jobs in dispatcher.turn(0.0).values())


def test_running_samples_move_where_it_pays_and_are_made_once() -> None:
    """A sample on a slow generator turns out to be long, and a fast one is empty by then."""
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[(1000.0, float(true))] for true in np.linspace(500, 10_000, 500)])
    jobs = [job(group, 1000.0) for group in range(8)]
    tables = [CURVE.table(4), CURVE.scaled(4.0).table(4)]

    def run(truth: dict[tuple[int, int], int], **options: Any) -> tuple[float, list[Span]]:
        spans: list[Span] = []
        policy = DeadlinePolicy(GroupBeliefs(beliefs), replans=10, **options)
        return generate(jobs, truth, tables, policy, spans, thinking=False), spans

    truth = {one.key: 600 + one.key[0] for one in jobs}
    slow = next(span.length for span in run(truth)[1] if span.generator == 1)
    truth = {key: 9000 if length == slow else length for key, length in truth.items()}
    stays, _ = run(truth)
    moves, spans = run(truth, moves="always", prefill_s=PREFILL_S)
    assert sorted(span.length for span in spans) == sorted(truth.values())
    assert next(span for span in spans if span.length == 9000).generator == 0
    assert moves < 0.6 * stays


@pytest.mark.parametrize(
    ("moves", "keeping", "may"),
    [("exact", 2, True), ("exact", 1, False), ("always", 0, True), ("never", 2, False)],
)
def test_samples_move_only_where_they_keep_their_bits_unless_told_otherwise(
    moves: MovesWhere, keeping: int, may: bool
) -> None:
    """A generator has run out of work, and the other one has all that is left."""
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[(float(length), 2.0 * length)] for length in np.linspace(100, 1000, 500)])
    policy = DeadlinePolicy(GroupBeliefs(beliefs), replans=10, moves=moves)
    dispatcher = Dispatcher(policy)
    for number, name in enumerate("ab"):
        steep = LatencyCurve((1, 8), (0.01, 0.05)).table(8)
        dispatcher.join(name, 8, steep, 0.0, keeps_bits=number < keeping)
    jobs = [job(group, 1000.0) for group in range(16)]
    dispatcher.admit(jobs, 0.0)
    given_ = dispatcher.turn(0.0)
    now = 3.0
    for one in given_["b"]:
        dispatcher.finished(one.key, 2000, now)
    for _ in range(20):
        dispatcher.turn(now)
        if moved := dispatcher.moved(now):
            assert {target for _, _, target in moved} == {"b"}
            assert may
            return
        now += 0.5
    assert not may


def test_some_shorter_samples_begin_with_the_longest() -> None:
    """They soon tell whether lengths are as predicted. Who knows the lengths needs none."""

    def dealt(error: float) -> list[float]:
        rng, beliefs = np.random.default_rng(0), Beliefs(LONGEST)
        lengths = paper_lengths(1024, LONGEST, rng)
        beliefs.observe(
            [[pair] for pair in zip(lengths * rng.lognormal(0, error, 1024), lengths, strict=True)]
        )
        dispatcher = Dispatcher(DeadlinePolicy(GroupBeliefs(beliefs)))
        for name in "abcd":
            dispatcher.join(name, 256, CURVE.table(256), 0.0)
        jobs = [job(group, float(length)) for group, length in enumerate(paper_lengths(1024, LONGEST, rng))]
        dispatcher.admit(jobs, 0.0)
        given_ = [one.prompt.predicted for jobs in dispatcher.turn(0.0).values() for one in jobs]
        assert dispatcher.waiting > 100, "else there is no plan that keeps slots empty"
        median = float(np.median([one.prompt.predicted for one in jobs]))
        return [length for length in given_ if length < median]

    assert 8 <= len(dealt(0.25)) <= 64
    assert not dealt(0.0)


def test_a_sample_that_lives_longer_than_thought_possible_holds_nothing_up() -> None:
    beliefs = Beliefs(LONGEST)
    beliefs.observe([[(100.0, 100.0)] for _ in range(500)])
    jobs = [job(group, 100.0) for group in range(20)]
    truth = {one.key: 5000 if one.key[0] == 3 else 100 for one in jobs}
    policy = DeadlinePolicy(GroupBeliefs(beliefs), replans=5)
    seconds = generate(jobs, truth, [CURVE.table(4)] * 2, policy, thinking=False)
    assert seconds < 5000 * CURVE.table(4)[4] + 5


def test_replay_steps_as_its_curve_says() -> None:
    clock = VirtualClock()
    lengths = {"a": 10, "b": 4, "c": 3}
    engine = ReplayEngine(np.array([1.0, 1.0, 2.0]), lambda request: lengths[request.id], clock)
    for name in lengths:
        engine.submit(SampleRequest(name, (), 100, 0, float(lengths[name])))
    ended = []
    while (moment := engine.next_end()) < float("inf"):
        clock.time = moment
        ended += [(done.id, clock.time) for done in engine.step(0.0)]
    # a and b run: 4 steps of 2 s; then a and c: 3 steps of 2 s; then a alone: 3 steps of 1 s
    assert ended == [("b", 8.0), ("c", 14.0), ("a", 17.0)]
