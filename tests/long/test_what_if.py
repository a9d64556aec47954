"""Recorded samples trained with other settings: the same bits where they must be, honest estimates after."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from msgspec import structs
from typer.testing import CliRunner

from consumers.batches.reweighting import LEAST_SHARE, reweighted
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from consumers.learners.optimizing import NotFinite, Stepped
from consumers.replay import Again
from consumers.steps import stage_comparison
from consumers.steps.failing import TrainingFailed
from consumers.what_if import Variant, WhatIf, WhatIfCurve
from flows.cli import app
from flows.run.what_if_settings import variants_of, with_changes
from flows.view.what_if_rows import conclusion
from infra import runs
from schemas.loading import RunFileError
from schemas.messages import Sample
from schemas.runspec import RunSpec
from schemas.topics import Topics
from tests.factories import make_context, make_sample, make_spec, make_tiny_model
from tests.fakes.crashing import World
from tests.fakes.drawing import Drawing, drawing

ALGORITHM = {"iterations": 5, "groups": 4, "group_size": 4, "learning_rate": 3e-3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, width=16))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.tail._POLL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "200")


def world_of(folder: Path, start: str, **sections: Any) -> tuple[World, Drawing]:
    spec = make_spec(
        algorithm=ALGORITHM | sections.pop("algorithm", {}), sampling={"max_tokens": 2},
        trainer={"checkpoint_every": 2} | sections.pop("trainer", {}), **sections,
    )  # fmt: skip
    context = make_context(spec, folder)
    runs.create(context.store, spec, bootstrap_servers="none", model=start, topics=set(), run_id="test-1")
    world = World(context, start)
    return world, drawing(world, start)


class Watched(TorchLearner):
    """A learner that notes the weights that each step begins with."""

    noted: ClassVar[list[dict[str, torch.Tensor]]]

    def score(self, parts: Any, needs: Any) -> Any:
        self.noted.append(self.weights())
        return super().score(parts, needs)


def curves(
    world: World, model: str, first: int, last: int, *changes: str, learner: type[TorchLearner] = TorchLearner
) -> list[WhatIfCurve]:
    spec = world.context.spec
    again = Again(world.context, lambda: TorchLearner(model, spec), lambda done, total: None)
    asked = [Variant(one, with_changes(spec, one.split())) for one in changes]
    what_if = WhatIf(again, spec, lambda of: learner(model, of), lambda name, done, total: None)
    return list(what_if.curves(first, last, asked))


def roots(curve: WhatIfCurve) -> list[str]:
    return [point.root for point in curve.points]


SAME = "algorithm.learning_rate=0.003"


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"loss": {"kind": "ppo", "value_learning_rate": 1e-2}},
        {"loss": {"correction": "decoupled"}, "algorithm": {"optimizer_steps": 2, "iterations": 3}},
        {"algorithm": {"mode": "async", "staleness": 1}},
        {"loss": {"kind": "tb", "replay": 0.5}},
        {"model": {"lora": {"rank": 4}}, "algorithm": {"optimizer_steps": 2, "iterations": 3}},
    ],
    ids=["grpo", "ppo", "several steps", "async", "tb", "lora"],
)
def test_the_recorded_settings_come_to_the_recorded_bits(
    tmp_path: Path, model: str, sections: dict[str, Any]
) -> None:
    world, _ = world_of(tmp_path, model, **sections)
    world.live()
    steps = world.ledger()
    own, variant = curves(world, model, 2, 4, SAME)
    for curve in (own, variant):
        assert roots(curve) == [step.root_out for step in steps[2:5]]
        assert [point.metrics["grad_norm"] for point in curve.points] == [
            step.metrics["grad_norm"] for step in steps[2:5]
        ]
        assert not any(point.corrected for point in curve.points)
        assert all(point.weights_apart == 0 for point in curve.points)
    assert all(point.equal for point in own.points)
    if not sections:
        assert [point.samples.of_samples for point in variant.points] == [1.0] * 3
        assert [point.samples.reward for point in own.points] == pytest.approx(
            [step.metrics["reward"] for step in steps[2:5]]
        )


@pytest.mark.parametrize(
    "changes",
    [
        "algorithm.learning_rate=0.01",
        "loss.kind=rloo algorithm.max_grad_norm=0.1",
        "loss.kind=dr_grpo loss.clip_high=0.5",
        "trainer.microbatch_tokens=16 algorithm.betas=[0.5,0.9]",
    ],
)
def test_its_first_iteration_is_that_of_a_real_run_to_the_bit(
    tmp_path: Path, model: str, changes: str
) -> None:
    """The run is trained to iteration 2 with its own settings, then goes on in earnest with the others."""
    algorithm = {"optimizer_steps": 1 if "rloo" in changes else 2, "iterations": 6}
    world, _ = world_of(tmp_path / "parent", model, algorithm=algorithm)
    world.live()
    first = 2 * algorithm["optimizer_steps"]
    own, variant = curves(world, model, first, first + 3, changes)
    real, _ = world_of(tmp_path / "real", model, algorithm=algorithm | {"iterations": 2})
    real.live()
    assert [step.root_out for step in real.ledger()] == [step.root_out for step in world.ledger()[:first]]
    real.context.record.spec = with_changes(world.context.spec, changes.split())
    real.live()
    agree = algorithm["optimizer_steps"]
    assert roots(variant)[:agree] == [step.root_out for step in real.ledger()[first : first + agree]]
    assert roots(variant)[:agree] != roots(own)[:agree]
    assert variant.points[0].samples.of_samples == 1.0
    assert [point.corrected for point in variant.points] == [False] * agree + [True] * (4 - agree)
    apart = variant.points[0].weights_apart
    assert apart is not None and apart > 0


def test_an_offline_run_needs_no_correction(tmp_path: Path, model: str) -> None:
    """Its samples are the same whatever is learned: all steps are those of a real run."""
    source, _ = world_of(tmp_path, model)
    source.live()
    algorithm = ALGORITHM | {"mode": "offline", "recorded": "test-1", "iterations": 4}
    spec = make_spec(algorithm=algorithm, sampling={"max_tokens": 2})
    worlds = []
    for name, changes in (("test-2", []), ("test-3", ["algorithm.learning_rate=0.01"])):
        changed = with_changes(spec, changes)
        record = runs.create(
            source.context.store, changed, bootstrap_servers="none", model=model, run_id=name
        )
        topics = Topics(name, spec.lengths.classes)
        source.context.bus.create_topics(topics.all())
        worlds.append(World(replace(source.context, record=record, topics=topics), model))
        worlds[-1].live()
    own, variant = curves(worlds[0], model, 0, 3, "algorithm.learning_rate=0.01")
    assert variant.correction.startswith("none")
    for curve, world in ((own, worlds[0]), (variant, worlds[1])):
        assert roots(curve) == [step.root_out for step in world.ledger()]


def test_reward_estimates_are_right_within_their_errors(tmp_path: Path, model: str) -> None:
    """The mean reward is known exactly: all answers are counted, with their odds under the weights."""
    off, seen = [], 0
    for seed in (31, 32, 33):
        other = str(make_tiny_model(tmp_path / f"model-{seed}", layers=1, width=16, seed=seed))
        world, drawn = world_of(
            tmp_path / str(seed), other, seed=seed, algorithm={"groups": 16, "group_size": 8, "iterations": 6}
        )
        world.live()

        class Noting(Watched):
            noted: ClassVar[list[dict[str, torch.Tensor]]] = []

        own, lower, higher = curves(
            world, other, 0, 5, "algorithm.learning_rate=0.001", "algorithm.learning_rate=0.006",
            learner=Noting,
        )  # fmt: skip
        assert own.believable_until == 5
        later = [point for curve in (lower, higher) for point in curve.points[1:]]
        assert len(later) == len(Noting.noted), "one look at the samples a step, but where they are its own"
        for point, weights in zip(later, Noting.noted, strict=True):
            if point.samples.believable:
                exact = drawn.mean_reward(weights)
                off.append((point.samples.reward - exact) / point.samples.reward_error)
                seen += 1
        assert abs(own.points[-1].samples.reward - lower.points[-1].samples.reward) > 0.05, "they differ"
    assert seen >= 15
    assert np.mean(np.abs(off) > 4) <= 0.05


def test_a_variant_that_breaks_ends_with_the_reason(tmp_path: Path, model: str) -> None:
    world, _ = world_of(tmp_path, model)
    world.live()

    class Breaking(TorchLearner):
        def step(self, total: float) -> Stepped:
            if int(self.state()["steps"]) == 3:
                raise NotFinite("the gradient's norm is inf")
            return super().step(total)

    own, broken = curves(world, model, 1, 4, "algorithm.learning_rate=0.002", learner=Breaking)
    assert len(own.points) == 4
    assert [point.step for point in broken.points] == [1, 2]
    assert broken.ended == "step 3 can't be taken: the gradient's norm is inf"
    assert conclusion(broken).startswith(
        "can be believed up to its last step, 2; it ends there: step 3 can't"
    )
    _, wild = curves(world, model, 1, 4, "algorithm.learning_rate=0.1")
    assert wild.believable_until == 1
    assert conclusion(wild).startswith("can be believed up to step 1: from step 2 on too few of the samples")


def test_it_must_begin_an_iteration_if_ratios_do(tmp_path: Path, model: str) -> None:
    world, _ = world_of(tmp_path, model, algorithm={"optimizer_steps": 2, "iterations": 3})
    world.live()
    with pytest.raises(TrainingFailed, match=r"inside iteration 1, .* begin at step 2 or 4"):
        curves(world, model, 3, 4, "loss.correction=decoupled")
    assert len(curves(world, model, 3, 4, "loss.clip_high=0.5")[1].points) == 2
    with pytest.raises(TrainingFailed, match="ends with step 5: it has no step 9"):
        curves(world, model, 3, 9, "loss.clip_high=0.5")


@pytest.mark.parametrize(
    "change, message",
    [
        ("algorithm.groups=8", "decides which samples there are"),
        ("sampling.temperature=0.5", "decides which samples there are"),
        ("loss.resample=2", "decides which samples there are"),
        ("seed=3", "decides which samples there are"),
        ("trainer.keep_checkpoints=3", "no step depends on it"),
        ("placement.generators=3", "no step depends on it"),
        ("loss.clip=0.3", "there is no such setting"),
        ("loss.kind=rloo loss.clip_high=0.3", "clip_high: there is no such setting"),
        ("loss.clip_high=-1", "greater than 0"),
        ("loss.kind=ppo", "this run has none"),
        ("los.kind=ppo", "there is no section los"),
        ("loss=rloo", "write it as section.key=value"),
        ("trainer.microbatch_tokens=4", "must hold the longest sample"),
    ],
)
def test_settings_that_can_not_change_are_refused(change: str, message: str) -> None:
    with pytest.raises(RunFileError, match=message):
        with_changes(make_spec(), change.split())


def test_variants_of_the_command_line() -> None:
    spec = make_spec()
    assert [one.name for one in variants_of(spec, ["loss.clip_high=0.3"], [])] == ["loss.clip_high=0.3"]
    both = variants_of(spec, ["loss.clip_high=0.3"], ["loss.clip_low=0.1", "algorithm.betas='[0.8, 0.9]'"])
    assert [one.spec.loss.clip_high for one in both] == [0.3, 0.3]  # type: ignore[attr-defined]
    assert both[1].spec.algorithm.betas == (0.8, 0.9)
    with pytest.raises(RunFileError, match="given twice"):
        variants_of(spec, [], ["loss.clip_low=0.1", "loss.clip_low=0.1"])
    with pytest.raises(RunFileError, match="quotation"):
        variants_of(spec, [], ["loss.clip_low='0.1"])


def test_another_kind_keeps_only_what_both_have() -> None:
    spec = make_spec(loss={"kind": "grpo", "clip_low": 0.1, "advantage": "mean", "kl": 0.1})
    stored = RunSpec.model_validate_json(spec.model_dump_json())  # all keys are said in a run's record
    found = with_changes(stored, ["loss.kind=dapo"]).loss
    assert (found.kind, found.average, found.clip_low, found.clip_high) == ("dapo", "token", 0.1, 0.28)  # type: ignore[attr-defined]
    assert found.kl == 0.1
    assert with_changes(stored, ["loss.kind=gspo"]).loss.advantage == "mean"  # type: ignore[attr-defined]


def row_of(spec: RunSpec, group: int, index: int, reward: float, logprobs: Sequence[float]) -> TrainingRow:
    size = len(logprobs)
    sample: Sample = structs.replace(
        make_sample(spec, group, index, length=size), reward=reward,
        logprobs=np.array(logprobs, dtype=np.float32),
    )  # fmt: skip
    return TrainingRow(sample, 0, 0)


LOGPROBS = some.lists(some.floats(-30, 0, width=32), min_size=1, max_size=4)


@given(some.lists(some.tuples(some.integers(0, 2), some.floats(-5, 5), LOGPROBS, LOGPROBS), min_size=1))
def test_reweighting_holds_its_bounds(said: list[tuple[int, float, list[float], list[float]]]) -> None:
    spec = make_spec()
    rows = [row_of(spec, group, n, reward, one) for n, (group, reward, one, _) in enumerate(said)]
    now = [np.resize(np.array(other), len(one)) for _, _, one, other in said]
    found = reweighted(rows, now, [False] * len(rows))
    rewards = [row.sample.reward for row in rows]
    tokens = sum(len(one) for _, _, one, _ in said)
    assert 1 / len(rows) - 1e-9 <= found.of_samples <= 1 + 1e-9
    assert 1 / tokens - 1e-9 <= found.of_tokens <= 1 + 1e-9
    assert min(rewards) - 1e-6 <= found.reward <= max(rewards) + 1e-6
    assert found.reward_error >= 0
    same = reweighted(rows, now, [True] * len(rows))
    assert (same.of_samples, same.of_tokens) == (1, 1)
    assert same.reward == pytest.approx(np.mean(rewards))


def test_reweighting_by_hand() -> None:
    spec = make_spec()
    rows = [row_of(spec, 0, 0, 1.0, [-1.0, -1.0]), row_of(spec, 0, 1, 0.0, [-1.0])]
    found = reweighted(rows, [np.array([-1.0, -1.0 + math.log(3)]), np.array([-1.0])], [False, False])
    assert found.of_samples == pytest.approx(16 / 10 / 2)
    assert found.of_tokens == pytest.approx(25 / 11 / 3)
    assert found.reward == pytest.approx(0.75)
    failed = structs.replace(rows[0].sample, reward_error="it took too long")
    found = reweighted([TrainingRow(failed, 0, 0)], [rows[0].sample.logprobs], [False])
    assert math.isnan(found.reward)
    assert 0 < LEAST_SHARE < 1


def test_other_bits_within_the_tolerances_are_as_expected_elsewhere(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = world_of(tmp_path, model)
    world.live()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: world.context.bus)
    words = ["what-if", "test-1", "--from", "1", "--store", world.context.store.url]
    words += ["--steps", "1", "--set", "loss.clip_high=0.3"]
    found, apart = stage_comparison.compared, [0.5]

    def rounded(record: Any, taken: Any) -> list[Any]:
        return [replace(one, equal=False, apart=apart[0], tolerance=1.0) for one in found(record, taken)]

    monkeypatch.setattr("consumers.replay.compared", rounded)
    here = CliRunner().invoke(app, words)
    assert here.exit_code == 1
    assert "1 of 1 recorded steps came to OTHER BITS, first step 1" in here.output
    monkeypatch.setattr("consumers.replay.kind_of_machine", lambda: "another kind")
    elsewhere = CliRunner().invoke(app, words)
    assert elsewhere.exit_code == 0
    assert "came to other bits, first step 1, within the tolerances" in elsewhere.output.replace("\n", " ")
    apart[0] = 2.0
    assert CliRunner().invoke(app, words).exit_code == 1


def test_on_the_command_line(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = world_of(tmp_path, model)
    world.live()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: world.context.bus)
    words = ["what-if", "test-1", "--from", "1", "--store", world.context.store.url]
    picture = tmp_path / "what-if.png"
    both = ["--variant", "loss.clip_high=0.3", "--variant", "algorithm.learning_rate=1e-4 loss.kind=rloo"]
    result = CliRunner().invoke(app, [*words, "--steps", "3", *both, "-o", str(picture)])
    assert result.exit_code == 0, result.output
    assert "the recorded settings came to the recorded bits" in result.output
    assert (
        "algorithm.learning_rate=1e-4 loss.kind=rloo: can be believed up to its last step, 3" in result.output
    )
    assert "corrected from step 2 on: truncated, capped at 2" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = CliRunner().invoke(app, [*words, "--set", "loss.clip_high=0.3", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [curve["name"] for curve in said["curves"]] == ["recorded", "loss.clip_high=0.3"]
    assert [point["step"] for point in said["curves"][1]["points"]] == [1, 2, 3, 4], "as many as there are"
    file = str(tmp_path / "steps.tar.zst")
    made = CliRunner().invoke(
        app, ["bundle", "test-1", "--step", "1-3", "-o", file, "--store", world.context.store.url]
    )
    assert made.exit_code == 0, made.output
    result = CliRunner().invoke(
        app, ["what-if", file, "--from", "1", "--set", "loss.clip_high=0.3", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["curves"][1]["points"] == said["curves"][1]["points"][:3]
    result = CliRunner().invoke(app, ["what-if", file, "--from", "1", "--set", "loss.kl=0.1"])
    assert "the step file has none" in result.output.replace("\n", " ")
    for wrong, message in (
        ([], "nothing is changed"),
        (["--set", "algorithm.groups=2"], "decides which samples there are"),
        (["--set", "loss.clip_high=0.3", "-o", "picture.gif"], "ends with .png"),
        (["--set", "loss.clip_high=0.3", "--steps", "9"], "it has no step 9"),
    ):
        result = CliRunner().invoke(app, [*words, *wrong])
        assert result.exit_code in (2, 3)
        assert message in result.output.replace("\n", " ")
