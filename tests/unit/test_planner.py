"""The planner: a pure function of the run file and the ledger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.planner import Planner
from schemas.messages import Prompt, StepRecord
from schemas.runspec import RunSpec
from tests.factories import make_spec

PROBLEMS = [{"id": str(number), "prompt": f"{number:02d}:", "kind": str(number % 3)} for number in range(10)]


def planner(spec: RunSpec) -> Planner:
    return Planner("test-1", spec, PROBLEMS, lambda text: [ord(letter) % 20 + 2 for letter in text])


def trained(spec: RunSpec, iteration: int, prompts: list[Prompt]) -> list[StepRecord]:
    """What a trainer would record of an iteration."""
    steps = spec.algorithm.optimizer_steps
    records = []
    for mini in range(steps):
        mine = [p for p in prompts if p.window == iteration and p.mini == mini for _ in range(p.size)]
        count = len(mine)
        values: dict[str, Any] = {
            "run": "test-1", "trainer_epoch": 0, "iteration": iteration, "step": iteration * steps + mini,
            "last_of_iteration": mini + 1 == steps, "version_in": iteration, "version_out": iteration + 1,
            "root_out": "", "recipe": "", "partitions": np.zeros(count, np.int16),
            "offsets": np.zeros(count, np.int64), "groups": np.array([p.group for p in mine]),
            "indexes": np.zeros(count, np.int16),
            "lengths": np.array(
                [2 * (10 ** (int(p.problem_id) % 3)) + int(p.problem_id) for p in mine], dtype=np.int32
            ),
            "rewards": np.zeros(count, np.float32), "versions": np.zeros(count, np.int32),
            "seeds": np.zeros(count, np.uint64), "predicted": np.zeros(count, np.float32),
            "problem_ids": [p.problem_id for p in mine], "microbatches": np.zeros(0, np.int32),
            "losses": np.zeros(0), "metrics": {}, "finished_at": 0.0,
        }  # fmt: skip
        records.append(StepRecord(**values))
    return records


def whole_run(spec: RunSpec) -> tuple[list[Prompt], list[StepRecord]]:
    plan = planner(spec)
    prompts, ledger = plan.admit(), []
    for iteration in range(spec.algorithm.iterations):
        for record in trained(spec, iteration, prompts):
            ledger.append(record)
            if plan.observe(record):
                prompts += plan.admit()
    return prompts, ledger


specs = st.builds(
    lambda groups, steps, lookahead, iterations: make_spec(
        algorithm={
            "groups": groups * steps, "optimizer_steps": steps, "iterations": iterations,
            "mode": "async" if lookahead else "sync", "staleness": lookahead,
        }
    ),
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 0.5, 1, 2, 2.5]), st.integers(1, 5),
)  # fmt: skip


@given(specs)
@settings(max_examples=60, deadline=None)
def test_every_group_is_admitted_once_in_time(spec: RunSpec) -> None:
    prompts, ledger = whole_run(spec)
    algorithm = spec.algorithm
    assert sorted(p.group for p in prompts) == list(range(algorithm.iterations * algorithm.groups))
    assert len(ledger) == algorithm.iterations * algorithm.optimizer_steps
    for prompt in prompts:
        assert prompt.window - prompt.min_version <= algorithm.lookahead + 1e-9 or algorithm.lookahead % 1
        assert 0 <= prompt.length_class < spec.lengths.classes
    by_bundle: dict[tuple[int, int, int], list[Prompt]] = {}
    for prompt in prompts:
        by_bundle.setdefault((prompt.window, prompt.mini, prompt.bundle), []).append(prompt)
    assert all(len(members) == members[0].bundle_groups for members in by_bundle.values())
    if algorithm.mode == "async":
        assert all(prompt.bundle_groups == 1 for prompt in prompts), "the trainer decides what goes together"


@given(specs, st.data())
@settings(max_examples=40, deadline=None)
def test_a_restart_plans_the_same_prompts(spec: RunSpec, data: st.DataObject) -> None:
    prompts, ledger = whole_run(spec)
    again = planner(spec)
    replayed = again.admit()
    for record in ledger[: data.draw(st.integers(0, len(ledger)))]:
        if again.observe(record):
            replayed += again.admit()

    def essence(prompt: Prompt) -> list[Any]:
        return [
            value.tolist() if isinstance(value, np.ndarray) else value
            for name in prompt.__struct_fields__
            if name != "admitted_at"
            for value in [getattr(prompt, name)]
        ]

    assert [essence(p) for p in replayed] == [essence(p) for p in prompts[: len(replayed)]]


def test_every_epoch_has_each_problem_once_in_an_order_of_its_own() -> None:
    prompts, _ = whole_run(make_spec(algorithm={"groups": 10, "iterations": 3}))
    orders = [
        [p.problem_id for p in sorted(prompts, key=lambda p: p.group) if p.epoch == epoch]
        for epoch in range(3)
    ]
    assert all(sorted(order, key=int) == [p["id"] for p in PROBLEMS] for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_edges_are_learned_from_the_first_iteration() -> None:
    prompts, _ = whole_run(make_spec(algorithm={"groups": 10, "iterations": 3}, lengths={"classes": 3}))
    assert {p.length_class for p in prompts if p.window == 0} == {0}
    assert {p.length_class for p in prompts if p.window == 2} == {0, 1, 2}
    known = {p.problem_id: p.predicted for p in prompts if p.window == 2}
    assert known["0"] < known["1"] < known["2"]
    assert [p.length_class for p in prompts if p.window == 2 and p.problem_id in "012"].count(0) == 1


def test_the_ledger_of_a_trainer_thought_dead_changes_nothing() -> None:
    spec = make_spec()
    plan = planner(spec)
    records = trained(spec, 0, plan.admit())
    assert plan.observe(records[0])
    assert not plan.observe(records[0])
    assert plan.version == 1


def test_evaluation_prompts_never_reach_the_trainer() -> None:
    prompts = planner(make_spec()).evaluate(3, PROBLEMS[:4])
    assert [(p.purpose, p.min_version) for p in prompts] == [("eval", 3)] * 4
    assert len({p.group for p in prompts} | {-1 - n for n in range(12)}) == 16
    assert all(p.group < 0 for p in prompts)


@pytest.mark.parametrize("steps", [1, 2])
def test_optimizer_steps_share_all_lengths(steps: int) -> None:
    prompts, _ = whole_run(make_spec(algorithm={"groups": 10, "optimizer_steps": steps, "iterations": 3}))
    means = [
        np.mean([p.predicted for p in prompts if p.window == 2 and p.mini == mini]) for mini in range(steps)
    ]
    assert max(means) < 2 * min(means)  # where the lengths themselves differ by a factor of 30
