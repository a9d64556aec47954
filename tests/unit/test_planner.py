"""The planner: a pure function of the run file and the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from producers.planner import Planner
from producers.ranker.ranker import Question
from producers.restart import wrong_prompt
from producers.snapshots import PlannerState
from producers.tasks import TaskError
from schemas.messages import Prompt, StepRecord
from schemas.runspec import RunSpec
from tests.factories import make_spec

PROBLEMS = [{"id": str(number), "prompt": f"{number:02d}:", "kind": str(number % 3)} for number in range(10)]


class Told:
    """A predictor whose word depends on the problem and on the version."""

    def __init__(self, version: int) -> None:
        self._version = version
        self.name = f"told/{version}"

    def predict(self, questions: Sequence[Question]) -> np.ndarray:
        if not self._version:
            return np.full(len(questions), 4.0)
        return np.array([1 + (q.key >> 3) % 13 + self._version * (q.key % 3) / 4 for q in questions])


def tokens_of(text: str) -> list[int]:
    return [ord(letter) % 20 + 2 for letter in text]


def planner(spec: RunSpec, known: Sequence[Prompt] = ()) -> Planner:
    return Planner("test-1", spec, PROBLEMS, tokens_of, known)


def trained(spec: RunSpec, iteration: int) -> list[StepRecord]:
    """What a trainer would record of an iteration, as far as planning goes."""
    steps, none = spec.algorithm.optimizer_steps, np.zeros(0)
    return [
        StepRecord(
            run="test-1", trainer_epoch=0, iteration=iteration, step=iteration * steps + mini,
            last_of_iteration=mini + 1 == steps, version_in=iteration, version_out=iteration + 1, root_out="",
            recipe="", partitions=none, offsets=none, groups=none, indexes=none, lengths=none, rewards=none,
            versions=none, predicted=none, problem_ids=[], microbatches=none, losses=none,
            metrics={}, finished_at=0.0,
        )
        for mini in range(steps)
    ]  # fmt: skip


def whole_run(spec: RunSpec) -> tuple[list[Prompt], list[StepRecord]]:
    plan = planner(spec)
    prompts, ledger = plan.admit(Told), []
    for iteration in range(spec.algorithm.iterations):
        for record in trained(spec, iteration):
            ledger.append(record)
            if plan.observe(record):
                prompts += plan.admit(Told)
    return prompts, ledger


ROUTE = {"edges", "length_class"}  # where it travels: no bit of what is trained depends on that


def essence(prompt: Prompt, *, but: Collection[str] = ()) -> list[Any]:
    """All of it but when it was admitted."""
    return [
        value.tolist() if isinstance(value, np.ndarray) else value
        for name in prompt.__struct_fields__
        if name != "admitted_at" and name not in but
        for value in [getattr(prompt, name)]
    ]


specs = st.builds(
    lambda groups, steps, lookahead, iterations: make_spec(
        algorithm={
            "groups": groups * steps, "optimizer_steps": steps, "iterations": iterations,
            "mode": "async" if lookahead else "sync", "staleness": lookahead,
        }
    ),
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 0.3, 0.5, 1, 2, 2.5]), st.integers(1, 5),
)  # fmt: skip


@given(specs)
@settings(max_examples=60, deadline=None)
def test_every_group_is_admitted_once_in_time(spec: RunSpec) -> None:
    prompts, ledger = whole_run(spec)
    algorithm = spec.algorithm
    assert sorted(p.group for p in prompts) == list(range(algorithm.iterations * algorithm.groups))
    assert len(ledger) == algorithm.iterations * algorithm.optimizer_steps
    for prompt in prompts:
        assert prompt.iteration - prompt.min_version <= algorithm.lookahead + 1e-9 or algorithm.lookahead % 1
        assert 0 <= prompt.length_class < spec.lengths.classes
    by_bundle: dict[tuple[int, int, int], list[Prompt]] = {}
    for prompt in prompts:
        by_bundle.setdefault((prompt.iteration, prompt.mini, prompt.bundle), []).append(prompt)
    assert all(len(members) == members[0].bundle_groups for members in by_bundle.values())
    in_step = Counter((prompt.iteration, prompt.mini) for prompt in prompts)
    assert set(in_step.values()) == {algorithm.groups // algorithm.optimizer_steps}
    assert len(in_step) == len(ledger)
    if algorithm.mode == "async":
        assert all(prompt.bundle_groups == 1 for prompt in prompts), "the trainer decides what goes together"


@given(specs, st.data())
@settings(max_examples=40, deadline=None)
def test_a_restart_plans_what_is_missing_as_it_was_planned(spec: RunSpec, data: st.DataObject) -> None:
    prompts, ledger = whole_run(spec)
    steps = data.draw(st.integers(0, len(ledger)))
    before = planner(spec)
    sent = before.admit(Told)
    for record in ledger[:steps]:
        if before.observe(record):
            sent += before.admit(Told)
    # it was killed while it sent what it had admitted last: some of that is on the topic
    last = [prompt for prompt in sent if prompt.predictor == sent[-1].predictor]
    known = sent[: len(sent) - data.draw(st.integers(0, len(last)))]
    again = planner(spec, known)
    asked: list[int] = []

    def ranker_at(version: int) -> Told:
        asked.append(version)
        return Told(version)

    replayed = again.admit(ranker_at)
    for record in ledger:
        if again.observe(record):
            replayed += again.admit(ranker_at)
    had = {prompt.group for prompt in known}
    assert [essence(p) for p in replayed if p.group not in had] == [
        essence(p) for p in prompts if p.group not in had
    ]
    iterations = sum(record.last_of_iteration for record in ledger[:steps])
    assert min(asked, default=iterations) >= planner(spec, known).first_incomplete(iterations)


def test_every_epoch_has_each_problem_once_in_an_order_of_its_own() -> None:
    prompts, _ = whole_run(make_spec(algorithm={"groups": 10, "iterations": 3}))
    orders = [
        [p.problem_id for p in sorted(prompts, key=lambda p: p.group) if p.epoch == epoch]
        for epoch in range(3)
    ]
    assert all(sorted(order, key=int) == [p["id"] for p in PROBLEMS] for order in orders)
    assert orders[0] != orders[1] != orders[2]


def test_edges_are_learned_and_drift() -> None:
    prompts, _ = whole_run(make_spec(algorithm={"groups": 10, "iterations": 9}, lengths={"classes": 3}))
    assert {p.length_class for p in prompts if p.iteration == 0} == {0}
    assert {p.length_class for p in prompts if p.iteration == 8} == {0, 1, 2}
    edges = {tuple(p.edges) for p in prompts if p.iteration}
    assert len(edges) > 1, "predictions change with every version"
    assert len({tuple(p.edges) for p in prompts if p.iteration == 8}) == 1


def test_given_edges_stay() -> None:
    spec = make_spec(algorithm={"groups": 10, "iterations": 3}, lengths={"classes": 2, "edges": [5.0]})
    prompts, _ = whole_run(spec)
    assert all(p.edges == [5.0] and p.length_class == (p.predicted >= 5) for p in prompts)


def test_a_problem_that_the_task_does_not_have_is_named() -> None:
    with pytest.raises(TaskError, match="problem 'x', which the task does not have"):
        planner(make_spec()).question("x")


def test_the_ledger_of_a_trainer_thought_dead_changes_nothing() -> None:
    spec = make_spec()
    plan = planner(spec)
    plan.admit(Told)
    records = trained(spec, 0)
    assert plan.observe(records[0])
    assert not plan.observe(records[0])
    assert plan.version == 1


def test_evaluation_prompts_never_reach_the_trainer() -> None:
    prompts = planner(make_spec()).evaluate(3, PROBLEMS[:4], Told(3))
    assert [(p.purpose, p.min_version) for p in prompts] == [("eval", 3)] * 4
    assert len({p.group for p in prompts} | {-1 - n for n in range(12)}) == 16
    assert all(p.group < 0 for p in prompts)


@pytest.mark.parametrize("steps", [1, 2])
def test_optimizer_steps_share_all_lengths(steps: int) -> None:
    prompts, _ = whole_run(make_spec(algorithm={"groups": 10, "optimizer_steps": steps, "iterations": 3}))
    means = [
        np.mean([p.predicted for p in prompts if p.iteration == 2 and p.mini == mini])
        for mini in range(steps)
    ]
    assert max(means) < 1.5 * min(means)  # where the lengths themselves differ by a factor of 10


@given(specs, st.data())
@settings(max_examples=40, deadline=None)
def test_a_planner_that_goes_on_from_a_state_plans_the_same(spec: RunSpec, data: st.DataObject) -> None:
    """Whatever was sent behind the state, and whatever is gone of what was sent before."""
    prompts, ledger = whole_run(spec)
    before = planner(spec)
    before.admit(Told)
    kept = data.draw(st.integers(0, len(ledger)))
    for record in ledger[:kept]:
        if before.observe(record):
            before.admit(Told)
    if kept and not ledger[kept - 1].last_of_iteration:
        return  # one is made when an iteration was admitted
    state = PlannerState.model_validate_json(before.state().model_dump_json())
    steps = data.draw(st.integers(kept, len(ledger)))
    version = sum(record.last_of_iteration for record in ledger[:steps])
    sent = [prompt for prompt in prompts if prompt.group >= state.admitted]
    sent = sent[: data.draw(st.integers(0, len(sent)))] if steps > kept else []
    again = Planner("test-1", spec, PROBLEMS, tokens_of, sent, state=state, trained=version)
    lowest = again.first_incomplete(version)

    def ranker_at(number: int) -> Told:
        assert number >= lowest
        return Told(number)

    lost = set(data.draw(st.lists(st.integers(0, max(0, state.admitted - 1)))))
    resent = again.again(lost & set(range(version * spec.algorithm.groups, state.admitted)))
    first_open = version * spec.algorithm.groups
    assert {p.group for p in resent} == {group for group in lost if first_open <= group < state.admitted}
    planned = again.admit(ranker_at)
    for record in ledger[kept:]:
        if again.observe(record):
            planned += again.admit(ranker_at)
    # Edges are made from what was predicted lately. Of prompts that are trained and gone nobody knows that.
    gone = {p.group for p in prompts if p.group >= state.admitted and p.iteration < version}
    but = ROUTE if gone - {prompt.group for prompt in sent} else ()
    expected = {prompt.group: essence(prompt, but=but) for prompt in prompts}
    for prompt in [*resent, *planned]:
        assert essence(prompt, but=but) == expected[prompt.group]
        assert prompt.iteration >= version
    had = {prompt.group for prompt in sent} | set(range(state.admitted))
    assert {p.group for p in planned} == {
        p.group for p in prompts if p.group not in had and p.iteration >= version
    }


@given(specs, st.integers(1, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_a_run_that_is_resumed_with_more_iterations_admits_the_groups_of_these(
    spec: RunSpec, more: int, data: st.DataObject
) -> None:
    """At its end, or before it."""
    before = planner(spec)
    sent = before.admit(Told)
    for iteration in range(data.draw(st.integers(0, spec.algorithm.iterations))):
        for record in trained(spec, iteration):
            if before.observe(record):
                sent += before.admit(Told)
    algorithm = spec.algorithm.model_copy(update={"iterations": spec.algorithm.iterations + more})
    longer = spec.model_copy(update={"algorithm": algorithm})
    again = Planner("test-1", longer, PROBLEMS, tokens_of, state=before.state(), trained=before.version)
    assert again.first_incomplete(before.version) <= before.version
    sent += again.admit(Told)
    for iteration in range(before.version, algorithm.iterations):
        for record in trained(longer, iteration):
            if again.observe(record):
                sent += again.admit(Told)
    assert sorted(prompt.group for prompt in sent) == list(range(algorithm.iterations * algorithm.groups))


def test_its_memory_does_not_grow() -> None:
    spec = make_spec(algorithm={"groups": 2, "iterations": 3000, "mode": "async", "staleness": 2.5})
    plan, sizes = planner(spec), []
    plan.admit(Told)
    for iteration in range(2500):
        for record in trained(spec, iteration):
            assert plan.observe(record)
        plan.admit(Told)
        if iteration in (20, 2499):
            sizes.append(len(plan.state().model_dump_json()))
    assert sizes[1] < 1.2 * sizes[0]
    assert not plan._known


@pytest.mark.parametrize(
    ("field", "value"), [("mini", 7), ("bundle_groups", 0), ("bundle_groups", 99), ("predicted", 0.0)]
)
def test_a_prompt_that_no_feeder_of_the_run_sends_is_refused(field: str, value: float) -> None:
    spec = make_spec()
    good = planner(spec).admit(Told)[0]
    assert wrong_prompt(good, spec) == ""
    assert wrong_prompt(replace(good, **{field: value}), spec)
