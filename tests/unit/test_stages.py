"""Stages of a step: a replay names the first one that differs, by how much, and in which sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from consumers.learners.fingerprint import distance, fingerprint
from consumers.learners.learner import TorchLearner
from consumers.replay import Again, Replayed
from consumers.steps.stage_comparison import first_other
from infra.roles.context import RoleContext
from schemas.messages import StepRecord
from schemas.stages import MEANINGS, Stage, tolerances
from schemas.wire import decode, encode
from tests.factories import make_context, make_spec, make_tiny_model
from tests.fakes.crashing import World, hurry

ALGORITHM = {"iterations": 3, "groups": 4, "group_size": 2, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture
def world(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> World:
    spec = make_spec(algorithm=ALGORITHM, loss={"kind": "grpo", "kl": 0.1})
    hurry(monkeypatch, model, spec)
    world = World(make_context(spec, tmp_path), model)
    world.live()
    return world


def replayed(
    context: RoleContext, model: str, step: int, tamper: Callable[[Any], None] = lambda learner: None
) -> Replayed:
    def learner_of() -> TorchLearner:
        learner = TorchLearner(model, context.spec)
        tamper(learner)
        return learner

    return Again(context, learner_of, lambda done, total: None).step(step)


def of_rewards(learner: Any) -> None:
    """The reward of one sample, as the log has it, is another one."""
    advantages = learner.loss.advantages

    def changed(rows: Any) -> Any:
        return advantages([
            replace(row, sample=structs.replace(row.sample, reward=row.sample.reward + 0.5))
            if row.sample.id == "0000009-01" else row for row in rows
        ])  # fmt: skip

    learner.loss.advantages = changed


def of_logprobs(learner: Any) -> None:
    forward = learner._logprobs

    def changed(batch: Any) -> Any:
        found = forward(batch)
        owners = [row.sample.id for row in batch.rows]
        if "0000009-01" not in owners:
            return found
        return found + 0.01 * (batch.owner == owners.index("0000009-01"))

    learner._logprobs = changed


def of_reference(learner: Any) -> None:
    with torch.no_grad():
        next(iter(learner._reference.parameters())).mul_(1.5)


def of_loss(learner: Any) -> None:
    learner.loss.settings = learner.loss.settings.model_copy(update={"kl": 0.11})


def of_gradient(learner: Any) -> None:
    add = learner._policy._sum.add

    def changed(gradient: torch.Tensor) -> float:
        gradient[:4] *= 2
        return float(add(gradient))

    learner._policy._sum.add = changed


def of_optimizer(learner: Any) -> None:
    restore = learner._policy.restore

    def changed(*state: Any) -> None:
        restore(*state)
        for one in learner._policy._optimizer.state.values():
            one["exp_avg"].mul_(1.01)

    learner._policy.restore = changed
    learner._policy._optimizer.param_groups[0]["betas"] = (0.8, 0.95)


def of_weights(learner: Any) -> None:
    learner._policy._optimizer.param_groups[0]["weight_decay"] = 0.3


@pytest.mark.parametrize(
    ("tamper", "stage", "sample"),
    [
        (of_rewards, Stage.ADVANTAGE, "0000009-"),
        (of_reference, Stage.SCORES, ""),
        (of_logprobs, Stage.LOGPROBS, "0000009-01"),
        (of_loss, Stage.LOSS, ""),
        (of_gradient, Stage.GRADIENT, ""),
        (of_optimizer, Stage.OPTIMIZER, ""),
        (of_weights, Stage.WEIGHTS, ""),
    ],
)
def test_the_first_stage_that_differs_is_named(
    world: World, model: str, tamper: Callable[[Any], None], stage: Stage, sample: str
) -> None:
    found = replayed(world.context, model, 2, tamper)
    assert not found.equal and not found.as_expected
    other = first_other(found.stages)
    assert other is not None and other.stage is stage
    assert other.apart > 0 and math.isfinite(other.apart)
    if sample:
        assert other.row is not None
        assert found.taken.rows[other.row].sample.id.startswith(sample)


def test_all_stages_are_recorded_and_equal(world: World, model: str) -> None:
    found = replayed(world.context, model, 2)
    assert [one.equal for one in found.stages] == [True] * len(Stage)
    assert first_other(found.stages) is None and found.same_machine


def test_another_machine_may_differ_by_the_tolerance_of_the_record(world: World, model: str) -> None:
    def slightly(learner: Any) -> None:
        forward = learner._logprobs
        learner._logprobs = lambda batch: forward(batch) * (1 + 1e-6)

    found = replayed(world.context, model, 2, slightly)
    assert not found.equal and not found.as_expected
    elsewhere = replace(found, record=structs.replace(found.record, made_on="another one"))
    assert not elsewhere.equal and elsewhere.as_expected
    strict = structs.replace(elsewhere.record, tolerances=np.zeros(len(Stage)))
    assert not replace(found, record=strict).as_expected


def test_a_record_of_before_stages_were_recorded(world: World, model: str) -> None:
    found = replayed(world.context, model, 1)
    old = structs.replace(
        found.record, stages=np.zeros(0), tolerances=np.zeros(0), advantages=np.zeros(0), scores=np.zeros(0),
        logprobs=np.zeros(0), gaps=np.zeros(0), sizes=np.zeros(0), sketches=np.zeros(0), made_on="",
    )  # fmt: skip
    assert decode(encode(old), StepRecord).stages.size == 0
    stages = replace(found, record=old).stages
    said = {one.stage: one.equal for one in stages if one.equal is not None}
    assert said == {Stage.LOSS: True, Stage.NORM: True, Stage.WEIGHTS: True}


def test_records_with_impossible_marks_are_refused(world: World) -> None:
    record = world.ledger()[0]
    for changed in (
        {"gaps": np.zeros(3)}, {"tolerances": np.array([-1.0])}, {"tolerances": np.array([np.nan])},
        {"sketches": np.zeros(5)},
    ):  # fmt: skip
        assert structs.replace(record, **changed).wrong()


@given(st.integers(1, 200_000), st.floats(1e-6, 0.5), st.integers(0, 100))
def test_a_sketch_says_how_far_two_vectors_are_apart(count: int, share: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    vector = torch.randn(count, generator=draw)
    other = vector + share * torch.randn(count, generator=draw)
    ours, theirs = fingerprint([vector]), fingerprint([other])
    assert ours == fingerprint([vector.clone()])
    assert (ours.digest == theirs.digest) == bool(torch.equal(vector, other))
    apart, true = distance(np.array(ours.sketch), np.array(theirs.sketch)), float((other - vector).norm())
    if count >= 16:
        assert 0.2 * true < apart < 3 * true + 1e-4
        assert ours.size == pytest.approx(float(vector.norm()), rel=0.3)


def test_stages_are_in_order_and_explained() -> None:
    assert [stage.value for stage in Stage] == list(range(len(Stage))) == list(range(len(MEANINGS)))
    assert len(tolerances("float32")) == len(tolerances("bfloat16")) == len(Stage)
