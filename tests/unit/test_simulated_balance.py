"""A simulated run is balanced by the run's own code: it grows and shrinks with lengths, and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flows.planning.stage_times import LearnerTimes
from flows.planning.workload import DrawnLengths, LogNormalLengths, Workload
from flows.simulation.simulated_run import Outage, SimulatedRun, SimulatedSite, SimulationError
from flows.simulation.simulation_result import Simulation
from flows.simulation.world import simulate
from schemas.balancing import BalanceSection
from tests.factories import make_spec
from tests.unit.test_simulation import ENGINE, check_whole, digest

GROUPS, SIZE = 16, 2
RULE = BalanceSection(most=4)
UP_AND_DOWN = [1.0] * 6 + list(np.linspace(1, 5, 12)) + [5.0] * 6 + list(np.linspace(5, 1, 12)) + [1.0] * 8


def lengths(factors: Sequence[float], seed: int = 0) -> DrawnLengths:
    """Lengths of 100 tokens or so, times a factor for each iteration."""
    rng = np.random.default_rng(seed)
    drawn = 100 * rng.lognormal(-0.08, 0.4, (len(factors) * GROUPS, SIZE))
    answers = (drawn * np.repeat(factors, GROUPS)[:, None]).astype(np.int64) + 1
    return DrawnLengths(answers, np.full(len(answers), 10), answers.mean(axis=1))


def balanced(mode: str, factors: Sequence[float], **fields: Any) -> SimulatedRun:
    ahead = {"staleness": 1} if mode == "async" else {}
    spec = make_spec(
        sampling={"max_tokens": 5000, "max_prompt_tokens": 100}, trainer={"microbatch_tokens": 20_000},
        algorithm={
            "mode": mode, "iterations": len(factors), "groups": GROUPS, "group_size": SIZE, **ahead
        }, dispatch={"policy": "longest_first"},
    )  # fmt: skip
    values: dict[str, Any] = {
        "learner": LearnerTimes(1e-4, step_s=19.0), "sites": (SimulatedSite("here", (ENGINE,)),),
        "workload": lengths(factors), "balance": RULE, "start_s": 5.0, **fields,
    }  # fmt: skip
    return SimulatedRun(spec, **values)


def counts(result: Simulation) -> list[int]:
    """The numbers of generators, one after the other."""
    found = [step.generators for step in result.steps]
    return [one for place, one in enumerate(found) if not place or one != found[place - 1]]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_grows_with_lengths_and_shrinks_again(mode: str) -> None:
    run = balanced(mode, UP_AND_DOWN)
    result = simulate(run)
    check_whole(result, run, None)
    assert counts(result) == [1, 2, 3, 2, 1]
    assert [(one.before, one.after) for one in result.changes] == [(1, 2), (2, 3), (3, 2), (2, 1)]
    assert "one generator more saves" in result.changes[0].reason
    assert "with one generator less" in result.changes[-1].reason
    assert [at for at, _ in result.said] == [one.at_s for one in result.changes]
    fixed = simulate(replace(run, balance=None))
    assert result.ended_at < 0.75 * fixed.ended_at and counts(fixed) == [1]


def test_it_is_the_same_each_time_and_its_changes_tell_no_time_of_the_wall() -> None:
    run = balanced("async", UP_AND_DOWN)
    assert digest(simulate(run)) == digest(simulate(run))


def test_both_sides_take_what_a_run_without_waits_would_take() -> None:
    """One generator, whose slots are always full: what its steps take, and the learner's work."""
    run = balanced("async", [5.0] * 12, balance=RULE.model_copy(update={"dry": True, "lasting": 4}))
    result = simulate(run)
    first = result.changes[0]
    drawn = [
        step.generated["drawing"] + step.generated["drawing the tail"] + step.generated["prefilling"]
        for step in result.steps
    ]
    assert first.gen_s == pytest.approx((drawn[8] - drawn[2]) / 6, rel=0.1)
    learned = [step.learned["training"] + step.learned["stepping"] for step in result.steps]
    assert first.train_s == pytest.approx((learned[8] - learned[2]) / 6, rel=0.1)


def test_dry_recommends_once_and_changes_nothing() -> None:
    run = balanced("async", [5.0] * 12, balance=RULE.model_copy(update={"dry": True}))
    result = simulate(run)
    assert [(one.before, one.after, one.dry) for one in result.changes] == [(1, 2, True)]
    assert counts(result) == [1]
    assert "should have 2 generators" in result.said[0][1]
    assert result.ended_at == simulate(replace(run, balance=None)).ended_at


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_load_that_stays_causes_no_changes_to_and_fro(mode: str) -> None:
    for seed in range(2):
        for factor in (1.5, 2.2, 3.1, 4.6):
            run = balanced(mode, [factor] * 25, workload=lengths([factor] * 25, seed))
            found = [one.after - one.before for one in simulate(run).changes]
            assert found == sorted(found, reverse=True) and sum(one < 0 for one in found) <= 1


def test_one_that_leaves_hands_over_what_it_has_begun() -> None:
    """More are there than the run may have, and all have much to do."""
    sites = (SimulatedSite("here", (ENGINE,) * 3),)
    run = balanced(
        "async", [5.0] * 8, sites=sites, balance=BalanceSection(most=2), learner=LearnerTimes(1e-4)
    )
    result = simulate(run)
    check_whole(result, run, None)
    assert counts(result) == [3, 2]
    assert 0 < result.handed_over <= ENGINE.slots and not result.drawn_again


def test_there_are_no_more_than_machines_have_room_for() -> None:
    run = balanced("async", [5.0] * 16, sites=(SimulatedSite("here", (ENGINE,), most=2),))
    result = simulate(run)
    assert counts(result) == [1, 2]
    assert result.said[-1][1] == "the number of generators stays 2: the machines of here have room for 2"


def test_a_new_one_costs_from_when_it_is_started() -> None:
    site = SimulatedSite("here", (ENGINE,), price_per_hour=3600.0)
    run = balanced("async", [5.0] * 10, sites=(site,), balance=BalanceSection(most=2), start_s=7.0)
    result = simulate(run)
    (grown,) = result.changes
    assert result.cost == pytest.approx(result.ended_at + (result.ended_at - grown.at_s))
    assert result.generators * result.ended_at == pytest.approx(result.cost - 7.0)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_nothing_is_lost_though_generators_die_and_are_replaced(mode: str) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        failures = tuple(
            Outage(0, float(at), float(rng.uniform(1, 60)), notice_s=float(rng.choice([0.0, 0.1, 9.0])))
            for at in rng.uniform(0, 900, 5)
        )
        run = balanced(mode, UP_AND_DOWN, failures=failures, colocated=seed % 2 == 1)
        check_whole(simulate(run), run, None)


def test_the_site_that_is_balanced_is_one_of_the_run() -> None:
    sites = SimulatedSite("near", (ENGINE,)), SimulatedSite("far", (ENGINE,))
    workload = Workload(LogNormalLengths(500, 0.3), LogNormalLengths(10))
    run = balanced("async", [1.0] * 8, sites=sites, balanced="far", workload=workload)
    result = simulate(run)
    assert result.changes and max(step.generators for step in result.steps) > 2
    with pytest.raises(SimulationError, match="balanced is mars; the sites are near, far"):
        replace(run, balanced="mars")
    with pytest.raises(SimulationError, match="start_s"):
        replace(run, start_s=-1.0)
