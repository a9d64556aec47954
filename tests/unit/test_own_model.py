"""A second opinion on logprobs of a mixture of experts: it follows a sample's routes as the trainer does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed

from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner, unscored
from consumers.losses.loss import Needs
from flows.explain.own_model import OwnModel, RoutedAnswer
from infra.weights.weights_error import WeightsError
from schemas.expert_routes import pack_routes
from tests.factories import TINY_MIXTURES, make_sample, make_spec, make_tiny_mixture

SPEC = make_spec(sampling={"temperature": 0.7})


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_mixture(tmp_path_factory.mktemp("model") / request.param, request.param)


def routed_row(folder: Path, index: int = 0) -> TrainingRow:
    """A sample whose experts were drawn at random: a router would choose others."""
    sample = make_sample(SPEC, 0, index, length=9 + index)
    experts = TINY_MIXTURES[folder.name].get("num_experts") or 4
    draw = np.random.default_rng(index)
    tokens = sample.prompt_tokens.size + sample.tokens.size - 1
    chosen = np.argsort(draw.random((tokens, 2, experts)), axis=-1)[..., :2]
    routes = np.sort(chosen, axis=-1).astype(np.uint8)
    return TrainingRow(changed(sample, routes=pack_routes(routes)), 0, index)


def own_model(folder: Path, *, follows: bool = True) -> OwnModel:
    return OwnModel(str(folder), SPEC.sampling.temperature, follows=follows)


def test_it_says_what_the_trainer_says_of_routed_samples(folder: Path) -> None:
    rows = [routed_row(folder, index) for index in range(3)]
    learner = TorchLearner(str(folder), SPEC)
    trained = learner.ask(unscored(rows, learner.loss), Needs(before="step")).before
    assert trained is not None
    own, free = own_model(folder), own_model(folder, follows=False)
    found = np.concatenate([own.logprobs(RoutedAnswer.of(row)) for row in rows])
    np.testing.assert_allclose(found, trained, atol=2e-5)
    freely = np.concatenate([free.logprobs(RoutedAnswer.of(row)) for row in rows])
    assert np.abs(freely - trained).max() > 0.05
    without = TrainingRow(changed(rows[0].sample, routes=b""), 0, 0)
    assert RoutedAnswer.of(without).routes is None
    np.testing.assert_array_equal(
        own.logprobs(RoutedAnswer.of(without)), free.logprobs(RoutedAnswer.of(rows[0]))
    )


def test_routes_are_divided_where_the_prompt_was_read_by_other_weights(folder: Path) -> None:
    own, read = own_model(folder), RoutedAnswer.of(routed_row(folder))
    same = {name: one.clone() for name, one in own._model.state_dict().items()}
    np.testing.assert_allclose(own.after_prompt_of(same, same, read), own.logprobs(read), atol=2e-5)
    other = {name: one * 1.5 if "experts" in name else one for name, one in same.items()}
    assert np.abs(own.after_prompt_of(other, same, read) - own.logprobs(read)).max() > 1e-3


def test_tokens_beside_a_prompt_have_no_routes(folder: Path) -> None:
    own, read = own_model(folder), RoutedAnswer.of(routed_row(folder))
    longer = read.with_prompt([3], [5])
    assert longer.prompt == [3, *read.prompt, 5] and longer.routes is not None and read.routes is not None
    assert (longer.routes[0] == -1).all() and (longer.routes[len(read.prompt) + 1] == -1).all()
    np.testing.assert_array_equal(longer.routes[1 : len(read.prompt) + 1], read.routes[: len(read.prompt)])
    np.testing.assert_array_equal(longer.routes[len(read.prompt) + 2 :], read.routes[len(read.prompt) :])
    assert np.isfinite(own.logprobs(longer)).all()
    np.testing.assert_array_equal(own.logprobs(read.with_prompt([], [])), own.logprobs(read))


def test_rounding_is_that_of_the_same_experts(folder: Path) -> None:
    own, read = own_model(folder), RoutedAnswer.of(routed_row(folder))
    assert 0 < own.rounding(read).max() < 0.2


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    own, read = own_model(folder), RoutedAnswer.of(routed_row(folder))
    before = own.logprobs(read)
    with pytest.raises(WeightsError, match=r"has no model\.layers\.7\.input_layernorm\.weight, x"):
        own.load({"x": torch.zeros(1), "model.layers.7.input_layernorm.weight": torch.zeros(1)})
    np.testing.assert_array_equal(own.logprobs(read), before)


def test_weights_of_experts_are_rounded_too(folder: Path) -> None:
    own = own_model(folder)
    own.round_to("bfloat16")
    weights = own._model.state_dict()
    assert any("experts" in name for name in weights)
    assert all(torch.equal(one, one.bfloat16().float()) for one in weights.values())
