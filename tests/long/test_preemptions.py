"""Machines of a simulated run are taken away and come back: by seed, with or without a notice, and unpaid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flows.planning.machine_pools import PlanError
from flows.planning.preemption import Preemption
from flows.planning.stage_times import LearnerTimes
from flows.plans.asked_simulation import asked_row, simulate_asked
from flows.plans.simulated_split import simulated_split
from flows.simulation.simulated_run import SimulatedRun, SimulatedSite, SimulationError
from flows.simulation.world import simulate
from schemas.machines import MachinesSection
from tests.long.test_run_plan import inputs_of, spec_of_test
from tests.unit.test_simulated_balance import balanced
from tests.unit.test_simulation import ENGINE, check_whole, digest

OFTEN = Preemption(60.0, notice_s=10.0, back_s=40.0)


def spot(preemption: Preemption | None, engines: int = 3, **fields: Any) -> SimulatedRun:
    """Three generators that are always at work."""
    site = SimulatedSite("spot", (ENGINE,) * engines, price_per_hour=3600.0, preemption=preemption)
    more = {"balance": None, "learner": LearnerTimes(1e-4), "start_s": 5.0, "sites": (site,), **fields}
    return balanced("async", [5.0] * 20, **more)


def test_with_a_notice_nothing_is_drawn_again() -> None:
    run = spot(OFTEN)
    result = simulate(run)
    check_whole(result, run, None)
    assert result.preempted > 3 and result.handed_over > 3 and not result.drawn_again
    assert result.ended_at > simulate(spot(None)).ended_at


def test_without_a_notice_all_that_was_begun_is_drawn_again() -> None:
    run = spot(replace(OFTEN, notice_s=0.0))
    result = simulate(run)
    check_whole(result, run, None)
    assert result.preempted > 3 and result.drawn_again > 3 and not result.handed_over


def test_the_seed_says_when() -> None:
    run = spot(OFTEN)
    assert digest(simulate(run)) == digest(simulate(run))
    found = {simulate(replace(run, seed=seed)).preempted for seed in range(6)}
    assert len(found) > 1


def test_the_rate_is_met() -> None:
    """A machine that is gone for 50 s after 60 s on the average is taken away each 110 s."""
    counts = [simulate(replace(spot(OFTEN), seed=seed)) for seed in range(12)]
    hours = sum(one.ended_at for one in counts) / 110
    assert sum(one.preempted for one in counts) / 3 == pytest.approx(hours, rel=0.25)


def test_a_machine_that_is_away_costs_nothing() -> None:
    result = simulate(spot(OFTEN))
    away_s = result.steps[-1].generated["away"]
    # paid, though no generator is ready: while the notice runs out, and while the next process starts
    idle_s = result.preempted * (OFTEN.notice_s + 5.0)
    assert result.cost == pytest.approx(3 * result.ended_at - away_s + idle_s, abs=3 * 15.0)
    assert result.cost < 3 * result.ended_at


def test_generators_of_one_machine_go_together() -> None:
    site = SimulatedSite("spot", (ENGINE,) * 4, preemption=OFTEN, machine_generators=2)
    result = simulate(spot(None, sites=(site,)))
    assert {step.generators for step in result.steps} <= {0, 2, 4}
    assert len({step.generators for step in result.steps}) > 1


def test_a_balanced_run_grows_while_machines_are_away() -> None:
    site = SimulatedSite("spot", (ENGINE,) * 3, preemption=replace(OFTEN, back_s=400.0))
    run = replace(balanced("async", [5.0] * 30, sites=(site,)), seed=3)
    result = simulate(run)
    check_whole(result, run, None)
    assert any(one.after > one.before for one in result.changes)


@pytest.mark.parametrize(
    ("preemption", "size"),
    [(Preemption(-1.0), 1), (Preemption(1.0, -1.0), 1), (Preemption(1.0, 1.0, 0.0), 1), (OFTEN, 0)],
)
def test_what_can_not_be_is_refused(preemption: Preemption, size: int) -> None:
    site = SimulatedSite("spot", (ENGINE,), preemption=preemption, machine_generators=size)
    with pytest.raises(SimulationError, match="site spot"):
        spot(None, sites=(site,))


def test_a_run_whose_machines_never_stay_is_given_up() -> None:
    with pytest.raises(SimulationError, match="no iteration gets done: machines of spot"):
        simulate(spot(Preemption(1e6, 0.0, 0.01), start_s=0.0))


def test_it_is_asked_for_in_words_or_by_the_run_file() -> None:
    inputs = inputs_of(spec_of_test())
    words = {"generators": ["b=2"], "iterations": 30, "lengths": "4"}
    plain = simulate_asked(inputs, **words)  # type: ignore[arg-type]
    asked = simulate_asked(inputs, preempted=["b=60/h,notice=0,back=5"], **words)  # type: ignore[arg-type]
    assert asked.result.preempted and not plain.result.preempted
    assert asked_row(asked)["preempted"] == asked.result.preempted
    assert asked.cost_per_1000 == pytest.approx(asked.result.cost / asked.result.samples * 1000)
    pools = tuple(replace(pool, preemption=Preemption(60.0, 0.0, 5.0)) for pool in inputs.pools)
    by_file = simulate_asked(replace(inputs, pools=pools), **words)  # type: ignore[arg-type]
    assert by_file.figures == asked.figures
    split, workload = by_file.split, inputs.workload
    planned = simulated_split(inputs.spec, split, workload, iterations=30)
    stays = simulated_split(inputs.spec, plain.split, workload, iterations=30)
    assert planned.samples_per_s < stays.samples_per_s, "plans count it, too"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("often", "write .NAME=.RATE"),
        ("b=61", "at most 60 an hour"),
        ("b=1,back=0", "back above 0"),
        ("a=1", "generators stand on b, and none on a"),
    ],
)
def test_words_that_can_not_be_read(asked: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simulate_asked(inputs_of(spec_of_test()), generators=["b=1"], preempted=[asked])


def test_a_run_file_says_it() -> None:
    section = MachinesSection(preempted_per_hour=2.0)
    assert (section.preemption_notice_s, section.preemption_back_s) == (30.0, 120.0)
