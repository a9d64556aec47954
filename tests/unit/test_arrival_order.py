"""Order arrival: whatever comes first, each group is trained once, and none too late."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.stream.arrival_order import ArrivalOrder
from schemas.admission import admissible, first_open, latest_iteration, oldest_version
from schemas.identity import ROUND, round_of
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from schemas.taken import TakenGroups, trained_first
from tests.factories import make_sample, make_spec
from tests.feeding import make_step


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    steps = draw(st.integers(1, 3))
    staleness = draw(st.one_of(st.integers(0, 4).map(float), st.floats(0, 4).map(lambda k: round(k, 2))))
    given_cap = draw(st.one_of(st.none(), st.integers(0, 4).map(lambda more: int(staleness + 1) + more)))
    resample = {"kind": "dapo", "resample": 2} if draw(st.booleans()) else {}
    return make_spec(
        algorithm={
            "groups": steps * draw(st.integers(1, 6)), "optimizer_steps": steps, "mode": "async",
            "iterations": draw(st.integers(1, 12)), "order": "arrival", "staleness": staleness,
            "staleness_cap": given_cap, "group_size": 2,
        },
        trainer={"keep_weights": 64}, loss=resample,
    )  # fmt: skip


def step_of(spec: RunSpec, iteration: int, mini: int, groups: Iterable[int]) -> StepRecord:
    return make_step(spec, iteration, [make_sample(spec, group, 0) for group in groups], mini=mini)


@given(specs(), st.integers(0, 1 << 30))
@settings(deadline=None)
def test_all_are_trained_once_and_in_time_in_whichever_order_they_come(spec: RunSpec, seed: int) -> None:
    algorithm, most = spec.algorithm, spec.loss.most_draws
    rng, taken = random.Random(seed), TakenGroups(spec.algorithm)
    trained: list[int] = []
    again: set[int] = set()  # groups that are drawn in the place of others
    for iteration in range(algorithm.iterations):
        count = min(
            admissible(iteration, algorithm.groups, algorithm.lookahead),
            algorithm.iterations * algorithm.groups,
        )
        here = [group for group in (*range(count), *sorted(again)) if group not in taken]
        for mini in range(algorithm.optimizer_steps):
            step: list[int] = []
            redrawn: set[int] = set()
            order = ArrivalOrder(algorithm, taken, iteration, mini)
            rng.shuffle(here)
            while order.left:
                group = next(one for one in here if order.takes(one))  # else it would wait for ever
                here.remove(group)
                step.append(group)
                assert iteration <= latest_iteration(group, algorithm)
                assert iteration - oldest_version(group, algorithm.groups, algorithm.lookahead) <= (
                    algorithm.most_stale
                )
                if round_of(group) < most and rng.random() < 0.3:
                    redrawn.add(group)
                    again.add(group + ROUND)
                    here.append(group + ROUND)
                    rng.shuffle(here)
                else:
                    trained.append(group % ROUND)
                    order.took(group)
            taken.add(step_of(spec, iteration, mini, step), redrawn)
            if rng.random() < 0.3:  # a trainer that starts again has only what its checkpoint says
                at = iteration + (mini + 1 == algorithm.optimizer_steps)
                known, unsettled = taken.known(), taken.redrawn()
                taken = TakenGroups(algorithm, at, known, unsettled)
                taken.make_up(iteration * algorithm.optimizer_steps + mini + 1)
                assert (taken.known(), taken.redrawn()) == (known, unsettled)
    assert sorted(trained) == list(range(algorithm.iterations * algorithm.groups))


@given(specs())
def test_a_cap_as_large_as_the_staleness_leaves_no_choice(spec: RunSpec) -> None:
    algorithm = spec.algorithm.model_copy(
        update={
            "staleness": float(int(spec.algorithm.staleness)),
            "staleness_cap": int(spec.algorithm.staleness),
        }
    )
    taken = TakenGroups(algorithm)
    for iteration in range(algorithm.iterations):
        order = ArrivalOrder(algorithm, taken, iteration, 0)
        groups = algorithm.groups
        window = range(iteration * groups, (iteration + 1) * groups)
        if iteration >= algorithm.staleness:  # before, all groups are as old as each other
            last = admissible(iteration, groups, algorithm.lookahead)
            assert [group for group in range(last) if group not in taken and order.takes(group)] == list(
                window
            )
        for mini in range(algorithm.optimizer_steps):
            mine = window[mini :: algorithm.optimizer_steps]
            taken.add(step_of(spec.model_copy(update={"algorithm": algorithm}), iteration, mini, mine))


@given(specs(), st.integers(0, 200))
def test_a_group_is_open_until_its_last_iteration(spec: RunSpec, trained: int) -> None:
    first = first_open(trained, spec.algorithm)
    assert first == 0 or latest_iteration(first - 1, spec.algorithm) < trained
    assert latest_iteration(first, spec.algorithm) >= trained


@given(specs(), st.data())
@settings(deadline=None)
def test_lost_steps_count_as_having_trained_the_first_open_groups(spec: RunSpec, data: st.DataObject) -> None:
    """So that neither a group is trained too late nor a step finds too few."""
    algorithm = spec.algorithm
    iteration = data.draw(st.integers(1, algorithm.iterations))
    taken = TakenGroups(algorithm, iteration)
    taken.make_up(iteration * algorithm.optimizer_steps)
    lost = range(first_open(iteration, algorithm), iteration * algorithm.groups)
    assert taken.known() == list(lost) and not taken.redrawn()


def test_replayed_groups_are_no_groups_of_a_step() -> None:
    spec = make_spec(algorithm={"groups": 2, "group_size": 2, "mode": "async", "order": "arrival"})
    step = make_step(spec, 3, [make_sample(spec, group, 0) for group in (0, 1, 7, 6)], replayed=2)
    assert trained_first(step, spec.algorithm).tolist() == [False, False, True, True]
    taken = TakenGroups(spec.algorithm, 3)
    taken.add(step)
    assert taken.known() == [6, 7] and 7 in taken and 8 not in taken and 0 in taken
