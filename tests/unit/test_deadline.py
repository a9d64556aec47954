"""When a deadline is chosen, when not, and that it is said which; evaluations beside training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.backlog import Backlog
from producers.dispatch import corrected, drift_sums, makespan
from producers.dispatch import deadline as deadline_module
from producers.dispatch.beliefs import KEPT_PAIRS, Beliefs
from producers.dispatch.board import NO_DEADLINE
from producers.dispatch.deadline import Costs, DeadlinePolicy, DeadlineRule, Why
from producers.dispatch.dispatcher import ALONE, Dispatcher
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.longest_first_policy import LongestFirst
from producers.dispatch.recovery import lengths_before
from producers.dispatch.warm import WarmUp, choose_once
from schemas.messages import EVAL
from schemas.wire import encode
from tests.bench._lengths import CURVE
from tests.dispatching import Dispatched
from tests.factories import make_context, make_sample, make_spec
from tests.feeding import make_step
from tests.long.test_dispatch_bounds import Service
from tests.unit.test_backlog import prompt
from tests.waiting import wait_until

LONGEST = 20_000


def known() -> GroupBeliefs:
    """Beliefs of a ranker that erred before, too."""
    draw, beliefs = np.random.default_rng(0), Beliefs(LONGEST)
    true = draw.lognormal(8, 0.8, 300)
    beliefs.observe([[pair] for pair in zip(true * draw.lognormal(0, 0.25, 300), true, strict=True)])
    return GroupBeliefs(beliefs)


def jobs_of(count: int, *, first: int = 0) -> list[SampleJob]:
    draw = np.random.default_rng(first)
    return [
        SampleJob(prompt(first + number, size=1, min_version=0, predicted=float(draw.lognormal(8, 0.8))), 0)
        for number in range(count)
    ]


def dispatching(policy: DeadlinePolicy, count: int = 256, generators: int = 4) -> Dispatcher:
    dispatcher = Dispatcher(policy)
    for number in range(generators):
        dispatcher.join(f"g{number}", 64, CURVE.table(64), 0.0)
    dispatcher.admit(jobs_of(count), 0.0)
    return dispatcher


def in_force(policy: DeadlinePolicy) -> DeadlineRule:
    """A deadline that somebody chose."""
    policy.plan = DeadlineRule(0.9, 500.0, 600.0)
    return policy.plan


def test_no_choice_is_made_before_all_is_compiled() -> None:
    warm = threading.Event()
    policy = DeadlinePolicy(known(), thrift=1.0, warm=warm.is_set)
    dispatcher = dispatching(policy)
    given = dispatcher.turn(0.0)
    assert policy.why is Why.COLD and not policy.by_deadline and policy.costs.count == 0
    assert sum(map(len, given.values())) == 256, "it is longest first meanwhile"
    dispatcher.turn(1.0)
    assert policy.why is Why.COLD
    warm.set()
    dispatcher.turn(2.0)
    assert policy.why is Why.CHOSEN and policy.costs.count == 1
    dispatcher.turn(3.0)
    assert policy.costs.count == 1, "one choice, not one with every turn"


def test_a_choice_that_is_too_dear_leaves_the_plan_in_force() -> None:
    policy = DeadlinePolicy(known(), thrift=1e-9)
    dispatcher = dispatching(policy)
    plan = in_force(policy)
    dispatcher.turn(0.0)
    assert policy.plan is plan and policy.by_deadline and policy.costs.count == 0
    dispatcher.admit(jobs_of(64, first=1000), 1.0)
    dispatcher.turn(1.0)
    assert policy.plan is plan
    assert len(policy._towards._said) <= 256 + 64
    policy.plan = None
    dispatcher.admit(jobs_of(1, first=3000), 2.0)
    dispatcher.turn(2.0)
    assert policy.why is Why.DEAR and not policy.by_deadline


def test_with_one_instance_there_is_nothing_to_choose() -> None:
    policy = DeadlinePolicy(known(), thrift=1.0)
    dispatcher = dispatching(policy, generators=2)
    in_force(policy)
    dispatcher.leave("g1", 0.0)
    dispatcher.admit(jobs_of(1, first=900), 0.0)
    dispatcher.turn(0.0)
    assert policy.why is Why.ALONE and not policy.by_deadline


def test_nothing_is_chosen_by_what_nobody_knows() -> None:
    policy = DeadlinePolicy(GroupBeliefs(Beliefs(LONGEST)), thrift=1.0)
    given = dispatching(policy).turn(0.0)
    assert policy.why is Why.UNKNOWN and not policy.by_deadline
    assert sum(map(len, given.values())) == 256, "it is longest first"


def test_a_choice_never_holds_everybody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much time there is for it: meanwhile nobody is given anything."""
    policy = DeadlinePolicy(known(), thrift=100.0)
    monkeypatch.setattr(deadline_module, "_LONGEST_CHOICE_S", 1e-3)
    dispatcher = dispatching(policy)
    dispatcher.turn(0.0)
    assert policy.why is Why.DEAR


def test_one_choice_that_took_long_is_not_believed_and_two_are_not_for_ever() -> None:
    costs = Costs()
    usual = costs.of(1000.0)
    costs.add(50.0, 1000.0)
    assert costs.of(1000.0) == usual and costs.last_s == 50.0
    costs.add(50.0, 1000.0)
    dear = costs.of(1000.0)
    assert dear > 10 * usual
    for _ in range(100):
        costs.fade()
    assert dear / 4 < costs.of(1000.0) < dear / 2, "then it is tried again, and the next one counts"
    costs.add(0.001, 1000.0)
    costs.add(0.001, 1000.0)
    assert costs.of(1000.0) == pytest.approx(0.001)


def test_compiling_is_done_beside_and_once() -> None:
    warm = WarmUp()
    wait_until(warm, what="it is compiled", deadline_s=120)
    assert warm()


def test_all_that_is_called_is_compiled_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            called.add(name)
            return function(*given)

        return call

    wanted = {
        makespan: ("makespans", "reach"), drift_sums: ("likelihoods", "summed_logs"),
        corrected: ("declared_each", "corrected_rows", "corrected_parts", "parts_of_one"),
    }  # fmt: skip
    for module, names in wanted.items():
        for name in names:
            monkeypatch.setattr(module, name, noting(name, getattr(module, name)))
    choose_once()
    assert called == {name for names in wanted.values() for name in names}


def test_what_went_wrong_in_compiling_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("producers.dispatch.warm.choose_once", fails)
    warm = WarmUp()
    with pytest.raises(RuntimeError, match="no compiler"):
        wait_until(warm, what="its failure", deadline_s=20)


def test_it_is_counted_and_said_what_is_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(tmp_path)
    with caplog.at_level(logging.INFO):
        service.report()
        service.admit(0)
        service.wait("one generator", by_deadline=0.0, why_policy=float(Why.ALONE), choices=0)
        service.report("h")
        service.wait("two, and nothing known", by_deadline=0.0, why_policy=float(Why.UNKNOWN))
        policy = service.service._policy
        assert isinstance(policy, DeadlinePolicy)
        policy.plan = DeadlineRule(0.5, 1e9, 1e9)
        service.wait("a deadline", by_deadline=1.0)
        policy.plan = DeadlineRule(0.5, NO_DEADLINE, 0.0)
        service.wait("none", by_deadline=0.0)
    service.service.close()
    assert "dispatched towards a deadline" in caplog.text
    assert "dispatched the longest first: too few lengths are known yet" in caplog.text


def test_the_first_generator_does_not_get_everything() -> None:
    dispatcher = Dispatcher(LongestFirst(), latency_s=0.15)
    dispatcher.join("first", 64, CURVE.table(64), 0.0)
    dispatcher.admit(jobs_of(5000), 0.0)
    (given,) = dispatcher.turn(0.0).values()
    assert len(given) == 64 + ALONE
    for job in given[: ALONE // 4 - 1]:
        dispatcher.finished(job.key, 10, 1.0)
    assert dispatcher.turn(1.0) == {}, "it has enough, and need not be told with every sample"
    dispatcher.finished(given[-1].key, 10, 2.0)
    assert len(dispatcher.turn(2.0)["first"]) == ALONE // 4
    dispatcher.join("second", 64, CURVE.table(64), 3.0)
    assert len(dispatcher.turn(3.0)["second"]) == 64


def evaluation(version: int, index: int = 0) -> SampleJob:
    return SampleJob(
        prompt(-1 - version, purpose=EVAL, min_version=version, iteration=version, predicted=1e6), index
    )


def training(version: int, group: int) -> SampleJob:
    return SampleJob(prompt(group, min_version=version, iteration=version, predicted=9.0 - group), 0)


def test_an_evaluation_has_its_turn_behind_what_needs_the_same_weights() -> None:
    """And before what needs newer ones: it can't be overtaken for ever."""
    jobs = [evaluation(1), training(2, 8), training(1, 4), training(0, 0), evaluation(0), training(1, 5)]
    wanted = [(0, 0), (-1, 0), (4, 0), (5, 0), (-2, 0), (8, 0)]
    backlog = Backlog()
    for job in jobs:
        backlog.add(job)
    taken = [job.key for _ in jobs if (job := backlog.take(9)) is not None]
    assert taken == wanted
    dispatcher = Dispatcher(LongestFirst())
    dispatcher.join("g", 1, CURVE.table(1), 0.0)
    dispatcher.admit(jobs, 0.0)
    order = []
    for now in range(1, 7):
        (job,) = dispatcher.turn(float(now))["g"]
        order.append(job.key)
        dispatcher.finished(job.key, 1, float(now))
    assert order == wanted


def test_a_dispatcher_that_starts_again_knows_what_predictions_were_worth(tmp_path: Path) -> None:
    spec = make_spec(algorithm={"groups": 64, "group_size": 4, "iterations": 40})
    context = make_context(spec, tmp_path, role="feeder")
    for iteration in range(30):
        samples = [
            make_sample(spec, 64 * iteration + number // 4, number % 4, length=3 + number % 9, predicted=5.0)
            for number in range(256)
        ]
        for epoch in range(1 + (iteration == 29)):  # a trainer that was thought dead repeats the last step
            record = make_step(spec, iteration, samples, trainer_epoch=epoch)
            context.writer.send(context.topics.ledger, encode(record), key=str(iteration))
    found = lengths_before(context)
    assert [pair for group in found for pair in group][:9] == [(5.0, 3.0 + number) for number in range(9)]
    assert sum(map(len, found)) == KEPT_PAIRS and all(len(group) == 4 for group in found)
    dispatched = Dispatched(context)
    try:
        group_beliefs = dispatched.service._policy.group_beliefs
        assert group_beliefs is not None and group_beliefs.beliefs.are_known
    finally:
        dispatched.close()


@pytest.mark.parametrize(("inverted", "words"), [(0.25, "in mixed order"), (0.0, None)])
def test_where_predictions_mislead_jobs_are_dealt_in_mixed_order(inverted: float, words: str | None) -> None:
    """Of a ranker that takes the longest for the shortest now and then, and did so before."""
    draw, beliefs, count = np.random.default_rng(0), Beliefs(LONGEST), 512

    def predicted(lengths: np.ndarray) -> np.ndarray:
        upside_down = np.sort(lengths)[::-1][np.argsort(np.argsort(lengths))]
        return np.where(draw.random(len(lengths)) < inverted, upside_down, lengths) * draw.lognormal(
            0, 0.25, len(lengths)
        )

    def lengths(number: int) -> np.ndarray:
        return np.minimum(draw.lognormal(8, 0.9, number), LONGEST)

    true = lengths(KEPT_PAIRS)
    beliefs.observe([[pair] for pair in zip(predicted(true).tolist(), true.tolist(), strict=True)])
    policy = DeadlinePolicy(GroupBeliefs(beliefs), seed=1)
    dispatcher = Dispatcher(policy)
    for number in range(4):
        dispatcher.join(f"g{number}", 64, CURVE.table(64), 0.0)
    jobs = [
        SampleJob(prompt(number, size=1, min_version=0, predicted=length), 0)
        for number, length in enumerate(predicted(lengths(count)).tolist())
    ]
    dispatcher.admit(jobs, 0.0)
    given = [job.prompt.predicted for some in dispatcher.turn(0.0).values() for job in some]
    middle = float(np.median([job.prompt.predicted for job in jobs]))
    short = np.mean(np.array(given) < middle)
    if words:
        assert policy.words()[0] == words
        assert 0.35 < short < 0.65
    else:
        assert policy.words()[0] != "in mixed order"
        assert short < 0.35
