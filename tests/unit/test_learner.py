"""The learner against a plain reference, and its bits against the order in which work arrives."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from consumers.batching import advantages, plan, token_weight
from consumers.learner import NotFinite, TorchLearner
from consumers.stream import Row
from infra.weights.digest import digests_of
from schemas.runspec import RunSpec
from tests.factories import make_sample, make_spec, make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def rows_of(spec: RunSpec) -> list[Row]:
    pairs = itertools.product(range(spec.algorithm.groups), range(spec.algorithm.group_size))
    return [Row(make_sample(spec, g, i), 0, n) for n, (g, i) in enumerate(pairs)]


def normaliser(rows: list[Row], spec: RunSpec) -> float:
    lengths = [row.sample.true_length for row in rows]
    return sum(length * token_weight(length, spec.algorithm) for length in lengths)


def reference_gradient(model: str, spec: RunSpec, rows: list[Row]) -> dict[str, torch.Tensor]:
    """The loss written down sample by sample, from the formula, without batches, padding or chunks."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    worth = advantages([row.sample for row in rows], spec.algorithm)
    total = torch.zeros(())
    for row, advantage in zip(rows, worth, strict=True):
        sample = row.sample
        tokens = torch.tensor([*sample.prompt_tokens, *sample.tokens], dtype=torch.long)
        logits = net(input_ids=tokens.unsqueeze(0)).logits[0] / spec.sampling.temperature
        first = sample.prompt_tokens.size
        logprobs = logits.log_softmax(-1)[first - 1 : -1].gather(1, tokens[first:, None])[:, 0]
        ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
        low, high = 1 - spec.algorithm.clip_low, 1 + spec.algorithm.clip_high
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        total = total - token_weight(sample.true_length, spec.algorithm) * gain.sum()
    (total / normaliser(rows, spec)).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("weight", ["token", "sqrt", "sequence"])
@pytest.mark.parametrize("advantage", ["mean", "std"])
def test_gradient_is_that_of_the_plain_formula(model: str, weight: str, advantage: str) -> None:
    spec = make_spec(
        algorithm={"length_weight": weight, "advantage": advantage, "max_grad_norm": 1e9},
        sampling={"temperature": 0.8},
        trainer={"logits_chunk": 16},
    )
    rows = rows_of(spec)
    learner = TorchLearner(model, spec)
    for batch in plan(rows, spec.algorithm, 64, 0).batches:
        learner.accumulate(batch)
    expected = reference_gradient(model, spec, rows)
    norm = learner.step(normaliser(rows, spec))
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert norm == pytest.approx(float(size), rel=1e-4)
    # Adam's first moment after one step is (1 - beta1) times the gradient
    for name, parameter in learner._named.items():
        moment = learner._optimizer.state[parameter]["exp_avg"] / (1 - spec.algorithm.betas[0])
        torch.testing.assert_close(moment, expected[name], rtol=1e-3, atol=1e-6)


def test_the_same_bits_in_whichever_order_micro_batches_complete(model: str) -> None:
    spec = make_spec(algorithm={"groups": 8, "group_size": 4}, trainer={"microbatch_tokens": 40})
    rows = rows_of(spec)
    batches = plan(rows, spec.algorithm, 40, 0).batches
    assert len(batches) > 5
    results = []
    for seed in range(4):
        learner = TorchLearner(model, spec)
        for _ in range(3):
            random.Random(seed).shuffle(batches)
            for batch in batches:
                learner.accumulate(batch)
            learner.step(normaliser(rows, spec))
        results.append(digests_of(learner.weights()))
    assert all(result == results[0] for result in results)


def test_restored_state_goes_on_with_the_same_bits(model: str) -> None:
    spec = make_spec(algorithm={"warmup_steps": 3})
    rows = rows_of(spec)
    batches = plan(rows, spec.algorithm, 64, 0).batches

    def steps(learner: TorchLearner, count: int) -> None:
        for _ in range(count):
            for batch in batches:
                learner.accumulate(batch)
            learner.step(normaliser(rows, spec))

    straight, before = TorchLearner(model, spec), TorchLearner(model, spec)
    steps(straight, 4)
    steps(before, 2)
    after = TorchLearner(model, spec)
    after.restore(before.state())
    steps(after, 2)
    assert digests_of(after.weights()) == digests_of(straight.weights())


def test_nan_stops_the_step(model: str) -> None:
    spec = make_spec()
    learner = TorchLearner(model, spec)
    with torch.no_grad():
        next(iter(learner._named.values())).fill_(float("nan"))
    with pytest.raises(NotFinite):
        learner.accumulate(plan(rows_of(spec), spec.algorithm, 64, 0).batches[0])


def test_bf16_runs_publish_bf16_and_keep_fp32_masters(model: str) -> None:
    learner = TorchLearner(model, make_spec(model={"dtype": "bfloat16"}))
    assert {tensor.dtype for tensor in learner.weights().values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in learner._named.values()} == {torch.float32}
