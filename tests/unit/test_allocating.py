"""Dividing machines: against brute force, the paper's algorithm, budgets and prices; and what can't work."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.planning.allocating import ALIKE, MachineAllocator, PlanGoal, SplitEstimate
from flows.planning.machine_pools import MachinePool, PlanError
from flows.planning.stage_times import LearnerTimes
from flows.planning.step_estimate import GeneratorKind, MachineSplit, StepEstimator, TrainerKind
from flows.planning.two_stage_split import split_of_one_site, split_of_two_sites
from tests.planning import LINK, TableOfTests, demand_of, engine_of, pool_of

TIMES = TableOfTests({"fast": 1.0, "slow": 0.5}, degrees=(1, 2))


def all_splits(pools: list[MachinePool], times: TableOfTests, lookahead: float) -> list[MachineSplit]:
    """All splits, written out once more."""
    kinds = {
        (pool.name, degree): GeneratorKind(
            pool,
            times.engine(pool.hardware, degree, times.most_slots(pool.hardware, degree)),
            degree,
        )
        for pool in pools
        for degree in times.tensor_parallel(pool.hardware, pool.devices)
    }
    found = []
    amounts = [range(0, pool.total + 1, pool.grain) for pool in pools]
    degrees = [times.tensor_parallel(pool.hardware, pool.devices) for pool in pools]
    for place, pool in enumerate(pools):
        for training in range(pool.grain, pool.total + 1, pool.grain):
            trainer = TrainerKind(pool, times.learner(pool.hardware, training), training)  # type: ignore[arg-type]
            for devices in itertools.product(*amounts):
                if not pool.trains or devices[place] + training > pool.total:
                    continue
                for chosen in itertools.product(*degrees):
                    generators = tuple(
                        (kinds[one.name, degree], many // degree)
                        for one, degree, many in zip(pools, chosen, devices, strict=True)
                        if many // degree
                    )
                    if generators:
                        found.append(MachineSplit(trainer, generators, lookahead))
    return found


@given(
    machines=st.integers(1, 3),
    others=st.integers(1, 3),
    price=st.floats(0.1, 3),
    token_s=st.floats(1e-5, 3e-3),
    lookahead=st.sampled_from([0.0, 1.0, 2.0]),
    least=st.sampled_from(["time", "cost"]),
)
@settings(max_examples=25, deadline=None)
def test_no_split_is_better_than_the_one_that_is_found(
    machines: int, others: int, price: float, token_s: float, lookahead: float, least: str
) -> None:
    pools = [
        pool_of("a", machines + 1, 2, price=2.0),
        pool_of("b", others, 2, hardware="slow", price=price, site="far", trains=False, link=LINK),
    ]
    times = TableOfTests({"fast": 1.0, "slow": 0.5}, degrees=(1, 2), token_s=token_s, version_bytes=10**9)
    demand = demand_of(lookahead=lookahead)
    goal = PlanGoal("time" if least == "time" else "cost")
    found = MachineAllocator(pools, times, demand, may_take_turns=False).estimates(goal)[0]
    splits = all_splits(pools, times, lookahead)
    kinds = {id(kind): kind for split in splits for kind, _ in split.generators}
    steps = StepEstimator(demand, list(kinds.values())).step_s(splits)
    every = [SplitEstimate(split, step) for split, step in zip(splits, steps.tolist(), strict=True)]
    if least == "time":
        assert found.step_s <= min(one.step_s for one in every) * (1 + ALIKE + 1e-6)
    else:
        assert found.cost <= min(one.cost for one in every) * (1 + ALIKE + 1e-6)


@pytest.mark.parametrize("goal", [PlanGoal(), PlanGoal("cost"), PlanGoal("cost", 40.0)])
def test_a_search_finds_what_looking_at_all_finds(goal: PlanGoal, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [
        pool_of("a", 6, 8, price=3.0),
        pool_of("b", 8, 4, hardware="slow", price=0.8, site="far", trains=False, link=LINK),
        pool_of("c", 1, 8, price=2.0),
    ]
    demand = demand_of()
    every = MachineAllocator(pools, TIMES, demand).estimates(goal)[0]
    monkeypatch.setattr("flows.planning.allocating._MOST_SPLITS", 1)
    found = MachineAllocator(pools, TIMES, demand).estimates(goal)[0]
    if goal.least == "time":
        assert found.step_s <= every.step_s * (1 + ALIKE)
    else:
        assert found.cost <= every.cost * (1 + ALIKE)
        assert goal.deadline_s is None or found.step_s <= goal.deadline_s


@given(machines=st.integers(2, 12), token_s=st.floats(1e-5, 3e-3))
@settings(max_examples=25, deadline=None)
def test_where_its_assumptions_hold_the_papers_algorithm_finds_the_same_step(
    machines: int, token_s: float
) -> None:
    """One site, one kind, one way to use a machine; generation so far ahead that no sample is waited for."""
    times, demand = TableOfTests({"fast": 1.0}, token_s=token_s), demand_of(lookahead=1000.0)
    pool = pool_of("a", machines, 1)
    kind = GeneratorKind(pool, times.engine("fast", 1, 64))
    free = TrainerKind(pool, LearnerTimes(0.0))
    splits = [MachineSplit(free, ((kind, many),), demand.lookahead) for many in range(1, machines)]
    alone = StepEstimator(demand, [kind]).step_s(splits).tolist()

    def generating_s(many: int) -> float:
        return float(alone[many - 1])

    def training_s(many: int) -> float:
        learner = times.learner("fast", many)
        assert learner is not None
        return demand.training_s(learner)

    paper = split_of_one_site(machines, generating_s, training_s)
    ours = MachineAllocator([pool], times, demand, may_take_turns=False).estimates(PlanGoal())[0]
    assert ours.step_s == pytest.approx(paper.step_s, rel=ALIKE + 1e-3)


def test_the_papers_algorithm_as_printed() -> None:
    one = split_of_one_site(8, lambda x: 50 / x, lambda y: 30 / y)
    assert (one.generating, one.training, one.step_s) == (5, 3, 10)
    # the slower side keeps all; the other gives back until it comes nearest
    two = split_of_two_sites(4, 8, lambda x: 40 / x, lambda y: 30 / y)
    assert (two.generating, two.training, two.step_s) == (4, 3, 10)
    two = split_of_two_sites(8, 2, lambda x: 40 / x, lambda y: 30 / y)
    assert (two.generating, two.training) == (3, 2)
    assert two.step_s == 15  # 40 / 3 is nearer to 15 than 40 / 2 is
    with pytest.raises(ValueError, match="two machines at least"):
        split_of_one_site(1, lambda x: 1.0, lambda y: 1.0)


@given(machines=st.integers(2, 6), more=st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_more_machines_never_make_a_step_longer(machines: int, more: int) -> None:
    few, many = (
        MachineAllocator([pool_of("a", count, 4)], TIMES, demand_of()).estimates(PlanGoal())[0]
        for count in (machines, machines + more)
    )
    assert many.step_s <= few.step_s * (1 + ALIKE + 1e-9)


@given(factor=st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_prices_that_all_grow_alike_change_the_cost_and_nothing_else(factor: float) -> None:
    def best(by: float) -> SplitEstimate:
        pools = [
            pool_of("a", 3, 4, price=2.85 * by),
            pool_of("b", 3, 4, hardware="slow", price=1.0 * by, site="far", trains=False, link=LINK),
        ]
        return MachineAllocator(pools, TIMES, demand_of()).estimates(PlanGoal("cost"))[0]

    plain, scaled = best(1.0), best(factor)
    assert scaled.cost == pytest.approx(plain.cost * factor, rel=1e-6)
    assert scaled.step_s == pytest.approx(plain.step_s)


def test_a_deadline_costs_money() -> None:
    pools = [pool_of("a", 6, 4, price=3.0)]
    allocator = MachineAllocator(pools, TIMES, demand_of())
    quickest, cheapest = (allocator.estimates(PlanGoal(least))[0] for least in ("time", "cost"))
    assert quickest.step_s < cheapest.step_s
    between = (quickest.step_s + cheapest.step_s) / 2
    found = allocator.estimates(PlanGoal("cost", between))[0]
    assert found.step_s <= between
    assert cheapest.cost <= found.cost <= quickest.cost
    with pytest.raises(PlanError, match=r"the quickest takes .* Give a longer deadline"):
        allocator.estimates(PlanGoal("cost", quickest.step_s / 2))


def test_among_equally_quick_splits_the_smaller_is_taken() -> None:
    """A trainer that is slow however many generate: the others are given back."""
    times = TableOfTests({"fast": 1.0}, token_s=0.05)
    pools = [pool_of("a", 2, 1), pool_of("b", 16, 1, trains=False)]
    found = MachineAllocator(pools, times, demand_of(), may_take_turns=False).estimates(PlanGoal())[0]
    assert found.split.trainer.devices == 2
    assert sum(count for _, count in found.split.generators) < 16


def test_a_generator_is_on_one_machine() -> None:
    """Of machines of six devices each holds one generator on four devices, however many there are."""
    times = TableOfTests({"fast": 1.0}, degrees=(4,))
    pools = [pool_of("a", 4, 6), pool_of("b", 1, 1, generates=False)]
    for limit in (12_000, 0):  # all splits, and a search
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flows.planning.allocating._MOST_SPLITS", limit)
            found = MachineAllocator(pools, times, demand_of()).estimates(PlanGoal())
        most = {
            trainer: max(
                one.split.generators[0][1] for one in found if one.split.trainer.pool.name == trainer
            )
            for trainer in ("a", "b")
        }
        assert most == {"a": 3, "b": 4}


def test_turns_are_taken_on_one_machine_alone() -> None:
    found = MachineAllocator([pool_of("a", 3, 4)], TIMES, demand_of()).estimates(PlanGoal())
    assert {one.split.trainer.devices for one in found if one.split.takes_turns} == {4}


def test_few_machines_take_turns() -> None:
    pools = [pool_of("a", 1, 1)]
    found = MachineAllocator(pools, TIMES, demand_of()).estimates(PlanGoal())
    assert [one.split.takes_turns for one in found] == [True]
    with pytest.raises(PlanError, match="too few devices for both sides"):
        MachineAllocator(pools, TIMES, demand_of(), may_take_turns=False).estimates(PlanGoal())


def test_memory_that_keeps_trainers_from_fewer_devices_is_named() -> None:
    """With four devices a trainer would leave four to generators."""
    table = TableOfTests({"fast": 1.0}, least_trainer=8)
    with pytest.raises(PlanError, match=r"too few devices.*And with fewer devices it takes 8 dev"):
        MachineAllocator([pool_of("a", 1, 8)], table, demand_of(), may_take_turns=False).estimates(PlanGoal())


def test_machines_that_are_not_known_or_too_small() -> None:
    with pytest.raises(PlanError, match="figures are known of 'fats'; did you mean fast"):
        MachineAllocator([pool_of(hardware="fats")], TIMES, demand_of())
    small = TableOfTests({"fast": 1.0}, least_trainer=64)
    with pytest.raises(PlanError, match=r"all that trains, a \(4 × 8 fast\), can't hold the model"):
        MachineAllocator([pool_of()], small, demand_of())
    none = TableOfTests({"fast": 1.0}, slots=0)
    with pytest.raises(PlanError, match="all that generates"):
        MachineAllocator([pool_of()], none, demand_of())
    with pytest.raises(PlanError, match="none of them may train"):
        MachineAllocator([pool_of(trains=False)], TIMES, demand_of())


def test_deadlines_are_seconds() -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="seconds above 0"):
            PlanGoal("cost", wrong)


def test_a_slow_link_makes_a_far_pool_worth_less() -> None:
    def step_s(bytes_per_s: float, lookahead: float) -> float:
        times = TableOfTests({"fast": 1.0}, version_bytes=10**10)
        pools = [
            pool_of("a", 2, 1, generates=False),
            pool_of("b", 8, 1, site="far", trains=False, link=LINK.__class__(bytes_per_s)),
        ]
        return MachineAllocator(pools, times, demand_of(lookahead=lookahead)).estimates(PlanGoal())[0].step_s

    assert step_s(1e9, 0.0) > step_s(1e12, 0.0) + 9
    assert step_s(1e9, 3.0) == pytest.approx(step_s(1e12, 3.0), rel=0.05), "staleness hides the transfer"


def test_cores_that_both_sides_share_hold_both() -> None:
    lengths = np.full(64, 100)
    pool = MachinePool("here", "CPU", devices=2)
    kind = GeneratorKind(pool, engine_of(64, cores=1.0))
    demand = demand_of(lengths.tolist(), lookahead=4.0)
    alone = StepEstimator(demand, [kind])

    def step_s(cores: float, token_s: float, many: int = 1) -> float:
        trainer = TrainerKind(pool, LearnerTimes(token_s, cores=cores))
        return float(alone.step_s([MachineSplit(trainer, ((kind, many),), 4.0)])[0])

    quick = step_s(1.0, 1e-9)
    assert step_s(1.0, quick / demand.tokens) == pytest.approx(quick, rel=0.01), "a core for each"
    both = quick / demand.tokens
    assert step_s(2.0, both) == pytest.approx(1.5 * quick, rel=0.01), "the trainer takes both cores"
