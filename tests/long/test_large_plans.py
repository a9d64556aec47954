"""Plans of many pools and of large iterations take no longer than small ones: by counts of their work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.planning import allocating
from flows.planning.allocating import MachineAllocator, PlanGoal
from flows.planning.step_estimate import GeneratorKind, MachineSplit, TrainerKind
from flows.planning.workload import DrawnLengths, LogNormalLengths, Workload
from flows.plans import simulated_split as simulating
from flows.plans.simulated_split import MOST_SIMULATED, simulated_split
from flows.plans.smaller_split import even_lengths, smaller_run
from schemas.runspec import RunSpec
from tests.factories import make_spec
from tests.planning import LINK, TableOfTests, demand_of, engine_of, pool_of

WORKLOAD = Workload(LogNormalLengths(200, 0.6, 600), LogNormalLengths(50))


def spec_of_groups(groups: int, size: int = 8) -> RunSpec:
    return make_spec(
        sampling={"max_tokens": 600, "max_prompt_tokens": 100},
        algorithm={
            "mode": "async", "staleness": 1, "iterations": 30, "groups": groups, "group_size": size,
        },
        trainer={"microbatch_tokens": 8192, "bundle_tokens": 1024},
    )  # fmt: skip


def split_of_generators(count: int = 8, slots: int = 256, token_s: float = 1e-6) -> MachineSplit:
    pool, times = pool_of("a", 4, 8, price=8.0), TableOfTests({"fast": 1.0}, token_s=token_s)
    learner = times.learner("fast", 1)
    assert learner is not None
    return MachineSplit(TrainerKind(pool, learner, 1), ((GeneratorKind(pool, engine_of(slots)), count),), 1.0)


@pytest.mark.parametrize("least", ["time", "cost"])
def test_a_search_among_many_pools_has_a_bound(least: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocating, "_MOST_COLUMNS", 3000)
    monkeypatch.setattr(allocating, "_MOST_AT_ONCE", 500)
    kinds = ["fast", "slow", "middle"]
    pools = [
        pool_of(f"p{one}", 1 + one % 3, 4, hardware=kinds[one % 3], price=1.0 + one % 7,
                **({"site": "far", "trains": False, "link": LINK} if one % 2 else {}))
        for one in range(60)
    ]  # fmt: skip
    times = TableOfTests({"fast": 1.0, "slow": 0.5, "middle": 0.7}, degrees=(1, 2))
    allocator = MachineAllocator(pools, times, demand_of())
    goal = PlanGoal("time" if least == "time" else "cost")
    assert allocator.estimates(goal)
    assert len(allocator._starts()) == 3  # one for each kind of hardware
    in_turns = 60 * 80  # splits of one pool in turns, at the most
    assert allocator._columns <= 3000 + 500 + 60 + in_turns
    first = allocator._choices(pools[0], full=False)
    assert allocator._choices(pools[0], full=False) is first  # made once


@pytest.mark.parametrize("groups", [4096, 18_000])
def test_a_simulation_of_a_large_iteration_has_few_samples(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = smaller_run(spec_of_groups(groups), split_of_generators(64, 512), 7, MOST_SIMULATED)
    algorithm = small.spec.algorithm
    assert 256 <= algorithm.groups * algorithm.group_size <= 1024 * groups // 4096
    assert small.factor == groups / algorithm.groups
    if groups > 4096:
        return
    met = []
    real = simulating.simulate

    def counted(run):  # type: ignore[no-untyped-def]
        met.append(run.workload.answers.size)
        return real(run)

    monkeypatch.setattr(simulating, "simulate", counted)
    figures = simulated_split(spec_of_groups(groups), split_of_generators(64, 512), WORKLOAD, iterations=7)
    assert met == [7 * algorithm.groups * algorithm.group_size]
    assert figures.samples_per_s == pytest.approx(groups * 8 / figures.step_s)


def test_a_small_iteration_is_simulated_as_it_is() -> None:
    spec, split = spec_of_groups(32), split_of_generators()
    assert smaller_run(spec, split, 9, MOST_SIMULATED).split is split


@pytest.mark.parametrize("token_s", [1e-6, 3e-4])  # engines are slower, then the trainer
def test_the_smaller_run_takes_as_long_as_the_large_one(token_s: float) -> None:
    spec, split = spec_of_groups(256), split_of_generators(8, 256, token_s)
    whole = simulated_split(spec, split, WORKLOAD, iterations=12, most_samples=10**9)
    less = simulated_split(spec, split, WORKLOAD, iterations=12, most_samples=100)
    assert smaller_run(spec, split, 12, 100).factor >= 4
    assert less.step_s == pytest.approx(whole.step_s, rel=0.08)
    assert less.cost_per_1000 == pytest.approx(whole.cost_per_1000, rel=0.08)
    waiting = "waiting for samples"
    assert less.trainer[waiting] == pytest.approx(whole.trainer[waiting], abs=0.1)


@given(groups=st.integers(8, 200), fewer=st.integers(4, 8), iterations=st.integers(1, 3))
def test_fewer_groups_are_evenly_those_of_their_iteration(groups: int, fewer: int, iterations: int) -> None:
    draw = np.random.default_rng(groups)
    many = groups * iterations
    answers = np.sort(draw.integers(1, 1000, (many, 2)), axis=0)
    drawn = DrawnLengths(answers, np.arange(many), np.arange(many, dtype=float))
    found = even_lengths(drawn, groups, fewer)
    assert found.answers.shape == (fewer * iterations, 2)
    for number in range(iterations):
        rows = found.prompts[number * fewer : (number + 1) * fewer]
        assert len(set(rows.tolist())) == fewer
        assert all(number * groups <= row < (number + 1) * groups for row in rows.tolist())
        gaps = np.diff(rows)  # answers grow with the row, so even places are even rows
        assert gaps.max() - gaps.min() <= 1
