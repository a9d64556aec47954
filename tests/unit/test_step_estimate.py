"""The formulas for a step: never above what a schedule takes, and exact in plain cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.planning.decode_bound import DecodeBound, batch_sizes
from flows.planning.machine_pools import HERE, MachinePool, PlanError, check_pools, pools_of
from flows.planning.stage_times import EngineTimes, LearnerTimes
from flows.planning.step_estimate import (
    GeneratorKind,
    IterationDemand,
    MachineSplit,
    StepEstimator,
    TrainerKind,
    length_classes,
)
from schemas.runspec import PlacementSection
from tests.planning import demand_of, engine_of, pool_of

FREE = LearnerTimes(0.0)


def step_of(demand: IterationDemand, engine: EngineTimes, many: int, learner: LearnerTimes = FREE) -> float:
    kind = GeneratorKind(pool_of("a", 64, 1), engine)
    split = MachineSplit(TrainerKind(pool_of("b", 8, 1), learner), ((kind, many),), demand.lookahead)
    return float(StepEstimator(demand, [kind]).step_s([split])[0])


def test_a_lone_sample_takes_its_tokens() -> None:
    demand = demand_of([500], lookahead=0.0)
    assert step_of(demand, engine_of(8), 1) == pytest.approx(500 * 0.008, rel=0.01)


def test_with_all_the_time_of_the_world_batches_are_full() -> None:
    engine = engine_of(32)
    demand = demand_of([400] * 512, lookahead=50.0)
    full = engine.batch_s[32] / 32
    assert step_of(demand, engine, 2) == pytest.approx(512 * 400 * full / 2, rel=0.01)


def test_context_prefill_and_training_take_time() -> None:
    demand = demand_of([400] * 64, lookahead=20.0, prompt=100.0)
    plain = step_of(demand, engine_of(16), 1)
    context = step_of(demand, engine_of(16, context_s=1e-6), 1) - plain
    assert context == pytest.approx(64 * 400 * (100 + 200) * 1e-6, rel=0.02)
    prefill = step_of(demand, engine_of(16, prefill_s=1e-4), 1) - plain
    assert prefill == pytest.approx(64 * 100 * 1e-4, rel=0.05)
    slow = LearnerTimes(1e-2, step_s=1.0)
    assert step_of(demand, engine_of(16), 1, slow) == pytest.approx(64 * 500 * 1e-2 + 1.0, rel=0.01)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 32))
@settings(max_examples=40, deadline=None)
def test_no_schedule_in_sync_is_quicker(lengths: list[int], many: int, slots: int) -> None:
    """Longest first from one queue is a schedule, so the bound lies below it."""
    engine = engine_of(slots)
    found = step_of(IterationDemand(np.array(lengths), 0.0), engine, many)
    assert found <= _longest_first(lengths, engine, many) * 1.01
    assert found >= max(lengths) * engine.batch_s[1] * 0.99


def _longest_first(lengths: list[int], engine: EngineTimes, many: int) -> float:
    """The makespan of dealing samples in turn, the longest first, each engine for itself."""
    ends = []
    for place in range(many):
        waiting = sorted(lengths, reverse=True)[place::many]
        running: list[float] = []
        now = 0.0
        while waiting or running:
            while waiting and len(running) < engine.slots:
                running.append(float(waiting.pop(0)))
            steps = min(running)
            now += steps * engine.batch_s[len(running)]
            running = [left - steps for left in running if left > steps]
        ends.append(now)
    return max(ends)


def test_the_hull_is_convex_and_falls() -> None:
    noisy = EngineTimes(tuple(0.01 + 0.0001 * size * (1 + 0.3 * (size % 3)) for size in range(65)))
    bound = DecodeBound(noisy, context=100.0)
    assert (np.diff(bound.token_s) > 0).all()
    assert (np.diff(bound.occupied_s) < 0).all()
    slopes = np.diff(bound.occupied_s) / np.diff(bound.token_s)
    assert (np.diff(slopes) >= -1e-12).all()
    assert np.isinf(bound.occupied(np.array([0.001]))).all()
    assert batch_sizes(1) == [1]
    assert batch_sizes(1000)[-1] == 1000


def test_classes_hold_all_samples() -> None:
    lengths = np.arange(1, 1001)
    means, counts = length_classes(lengths)
    assert counts.sum() == 1000
    assert means[0] == 1000
    assert float((means * counts).sum()) == pytest.approx(lengths.sum())
    assert length_classes(np.array([5]))[0].tolist() == [5.0]


def test_machines_of_a_split_are_paid_whole() -> None:
    pool, far = pool_of("a", 4, 8, price=2.0), pool_of("b", 2, 4, price=0.5, site="far")
    trainer = TrainerKind(pool, FREE, 8)
    split = MachineSplit(
        trainer, ((GeneratorKind(pool, engine_of(4), 2), 4), (GeneratorKind(far, engine_of(4)), 5))
    )
    assert split.machines() == {pool: 2, far: 2}
    assert split.price == 5.0
    turns = MachineSplit(trainer, ((GeneratorKind(pool, engine_of(4), 2), 4),), takes_turns=True)
    assert turns.machines() == {pool: 1}


@pytest.mark.parametrize(
    ("trainer", "each", "generators", "machines"),
    [(8, 3, 5, 4), (4, 3, 5, 3), (2, 3, 6, 3), (8, 5, 3, 4), (8, 2, 12, 4), (16, 8, 1, 3)],
)
def test_no_generator_is_on_two_machines(trainer: int, each: int, generators: int, machines: int) -> None:
    pool = pool_of("a", 4, 8)
    kinds = ((GeneratorKind(pool, engine_of(4), each), generators),)
    assert MachineSplit(TrainerKind(pool, FREE, trainer), kinds).machines() == {pool: machines}
    alone = MachineSplit(TrainerKind(pool_of("b", 2, 8), FREE, trainer), kinds)
    assert alone.machines()[pool] == -(-generators // (8 // each))


def test_pools_of_a_run_file() -> None:
    here = pools_of(PlacementSection(), cores=6)
    assert [(one.name, one.devices, one.shares_cores) for one in here] == [(HERE, 6, True)]
    placement = PlacementSection.model_validate({
        "sites": {"far": {"link_gbit_s": 8, "link_latency_ms": 20}},
        "machines": {"a": {"hardware": "H800", "count": 2, "devices": 8, "price": 2.85},
                     "b": {"hardware": "H20", "site": "far"}},
    })  # fmt: skip
    near, far = pools_of(placement)
    assert (near.total, near.grain, near.generates, near.trains, near.link) == (16, 8, True, True, None)
    assert (far.generates, far.trains) == (True, False)
    assert far.link is not None
    assert far.link.bytes_per_s == 1e9
    assert far.link.latency_s == pytest.approx(0.02)
    check_pools([near, far], ["H800", "H20"])
    with pytest.raises(PlanError, match=r"machines\.b\.hardware: no figures are known of 'H20'"):
        check_pools([near, far], ["H800"])
    assert MachinePool("x", "CPU", devices=4, free_cores=3.5).work_cores == 3.5
