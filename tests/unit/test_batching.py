"""Advantages, cuts and micro-batches."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.batches.cutting import cut
from consumers.batches.micro_batches import deal, plan, planned_as
from consumers.batches.training_rows import TrainingRow
from consumers.losses.loss import loss_of
from tests.factories import make_sample, make_spec


@given(
    st.lists(st.integers(2, 200), min_size=1, max_size=9).map(sorted),
    st.integers(200, 900),
    st.integers(1, 4),
)
@settings(deadline=None)
def test_a_cut_has_few_even_parts(lengths: list[int], budget: int, parts: int) -> None:
    sizes = cut(lengths, budget, parts)

    def held(sizes: list[int]) -> list[int]:
        return [
            sum(lengths[begin:end]) for begin, end in itertools.pairwise([0, *itertools.accumulate(sizes)])
        ]

    possible = [
        [end - begin for begin, end in itertools.pairwise([0, *ends, len(lengths)])]
        for count in range(len(lengths))
        for ends in itertools.combinations(range(1, len(lengths)), count)
    ]
    fitting = [option for option in possible if max(held(option)) <= budget]
    fewest = min(len(option) for option in fitting)
    shared = -(-fewest // parts) * parts
    assert sum(sizes) == len(lengths)
    assert len(sizes) <= shared
    assert max(held(sizes)) == min(max(held(option)) for option in fitting if len(option) <= shared)


@given(st.lists(st.floats(1, 1000), max_size=30), st.integers(1, 5))
def test_work_is_dealt_evenly(costs: list[float], ranks: int) -> None:
    shares = deal(costs, ranks)
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    longest = max(sum(costs[number] for number in share) for share in shares)
    least = max([sum(costs) / ranks, *costs])  # no schedule takes less
    assert longest <= (2 - 1 / ranks) * least + 1e-6


def test_a_plan_holds_every_row_once_and_fits_the_budget() -> None:
    spec = make_spec(algorithm={"groups": 8, "group_size": 4})
    rows = [TrainingRow(make_sample(spec, g, i), 0, g * 4 + i) for g in range(8) for i in range(4)]
    planned = plan(rows, loss_of(spec), 64, 0)
    held = [row.offset for batch in planned.batches for row in batch.rows] + [
        row.offset for row in planned.idle
    ]
    assert sorted(held) == list(range(32))
    assert all(batch.packing.tokens <= 64 for batch in planned.batches)
    for batch in planned.batches:
        assert (
            batch.answer.numel()
            == sum(row.sample.tokens.size for row in batch.rows)
            == batch.behaviour.numel()
        )


rewards = st.lists(st.floats(0, 1, width=32), min_size=12, max_size=12)


@given(rewards, st.permutations(range(12)))
@settings(deadline=None)
def test_the_ledger_is_enough_to_plan_again_to_the_bit(values: list[float], order: list[int]) -> None:
    spec = make_spec(algorithm={"groups": 3, "group_size": 4})
    rows = [
        TrainingRow(make_sample(spec, number // 4, number % 4, reward=value), 0, number)
        for number, value in enumerate(values)
    ]
    planned = plan([rows[number] for number in order], loss_of(spec), 64, 0)
    recorded = [row for batch in planned.batches for row in batch.rows] + planned.idle
    sizes = [*(len(batch.rows) for batch in planned.batches), len(planned.idle)]
    again = [batch for batches in planned_as(recorded, sizes, loss_of(spec), 0) for batch in batches]
    assert [batch.rows for batch in again] == [batch.rows for batch in planned.batches]
    for one, other in zip(again, planned.batches, strict=True):
        for name in ("tokens", "answer", "owner", "behaviour", "advantage", "weight", "fresh"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_equal_rewards_cost_nothing() -> None:
    spec = make_spec()
    rows = [TrainingRow(make_sample(spec, 0, index, reward=0.1 + 0.2), 0, index) for index in range(2)]
    planned = plan(rows, loss_of(spec), 64, 0)
    assert not planned.batches
    assert len(planned.idle) == 2
