"""The learner against a plain reference, and its bits against the order in which work arrives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from consumers.batches.micro_batches import filler
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import TorchLearner
from consumers.learners.optimizing import NotFinite, closest
from consumers.losses.loss import Needs, loss_of
from infra.weights.digest import digests_of
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.training import batches_of, rows_of, scores, total


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def moment(learner: TorchLearner, name: str, spec: RunSpec) -> torch.Tensor:
    """Adam's first moment after one step is (1 - beta1) times the gradient."""
    state = learner.state()[f"optimizer.exp_avg.{name}"]
    return state / (1 - spec.algorithm.betas[0])


def reference_gradient(model: str, spec: RunSpec, rows: list[TrainingRow]) -> dict[str, torch.Tensor]:
    """The loss written down sample by sample, from the formula, without batches, padding or chunks."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = loss_of(spec)
    found = torch.zeros(())
    for row, advantage in zip(rows, [float(one[0]) for one in loss.advantages(rows)], strict=True):
        sample = row.sample
        tokens = torch.tensor([*sample.prompt_tokens, *sample.tokens], dtype=torch.long)
        logits = net(input_ids=tokens.unsqueeze(0)).logits[0] / spec.sampling.temperature
        first = sample.prompt_tokens.size
        logprobs = logits.log_softmax(-1)[first - 1 : -1].gather(1, tokens[first:, None])[:, 0]
        ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        found = found - loss.weight(sample.true_length) * gain.sum()
    (found / total(rows, spec)).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("average", ["token", "sqrt", "sequence"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_is_that_of_the_plain_formula(model: str, average: str, checkpointing: bool) -> None:
    spec = make_spec(
        loss={"average": average},
        algorithm={"max_grad_norm": 1e9},
        sampling={"temperature": 0.8},
        trainer={"logits_chunk": 16, "gradient_checkpointing": checkpointing},
    )
    rows = rows_of(spec)
    learner = TorchLearner(model, spec)
    learner.accumulate(batches_of(spec, rows))
    expected = reference_gradient(model, spec, rows)
    norm = learner.step(total(rows, spec)).norm
    size = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    assert norm == pytest.approx(float(size), rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(moment(learner, name, spec), gradient, rtol=1e-3, atol=1e-6)


def test_the_same_bits_in_whichever_order_micro_batches_complete(model: str) -> None:
    spec = make_spec(algorithm={"groups": 8, "group_size": 4}, trainer={"microbatch_tokens": 40})
    rows = rows_of(spec)
    batches = batches_of(spec, rows, 40)
    assert len(batches) > 5
    results = []
    for seed in range(4):
        learner = TorchLearner(model, spec)
        for _ in range(3):
            random.Random(seed).shuffle(batches)
            learner.accumulate(batches)
            learner.step(total(rows, spec))
        results.append(digests_of(learner.weights()))
    assert all(result == results[0] for result in results)


def test_restored_state_goes_on_with_the_same_bits(model: str) -> None:
    spec = make_spec(algorithm={"warmup_steps": 3})
    rows = rows_of(spec)
    batches = batches_of(spec, rows)

    def steps(learner: TorchLearner, count: int) -> None:
        for _ in range(count):
            learner.accumulate(batches)
            learner.step(total(rows, spec))

    straight, before = TorchLearner(model, spec), TorchLearner(model, spec)
    steps(straight, 4)
    steps(before, 2)
    after = TorchLearner(model, spec)
    after.restore(before.state())
    steps(after, 2)
    assert digests_of(after.weights()) == digests_of(straight.weights())


def test_a_filler_adds_nothing(model: str) -> None:
    spec = make_spec()
    batches = batches_of(spec, rows_of(spec))
    plain, filled = TorchLearner(model, spec), TorchLearner(model, spec)
    plain.accumulate(batches)
    filled.accumulate([filler(), *batches, filler()])
    assert filled.step(3.0) == plain.step(3.0)
    assert digests_of(filled.weights()) == digests_of(plain.weights())


def test_nan_stops_the_step(model: str) -> None:
    spec = make_spec()
    learner = TorchLearner(model, spec)
    with torch.no_grad():
        next(iter(learner._policy.named.values())).fill_(float("nan"))
    with pytest.raises(NotFinite):
        learner.accumulate(batches_of(spec, rows_of(spec)))


def test_bf16_runs_publish_bf16_and_keep_fp32_masters(model: str) -> None:
    learner = TorchLearner(model, make_spec(model={"dtype": "bfloat16"}))
    assert {tensor.dtype for tensor in learner.weights().values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in learner._policy.named.values()} == {torch.float32}


def test_scores_are_those_of_a_plain_forward_pass(model: str, tmp_path: Path) -> None:
    other = str(make_tiny_model(tmp_path, seed=5))
    spec = make_spec(loss={"kind": "tb", "reference": other}, sampling={"temperature": 0.7})
    learner = TorchLearner(model, spec)
    rows = rows_of(spec)
    scored = scores(learner, rows)
    for folder, name in ((other, "reference"), (model, "before")):
        net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in scored:
            tokens = torch.tensor([*row.sample.prompt_tokens, *row.sample.tokens], dtype=torch.long)
            first = row.sample.prompt_tokens.size
            logits = net(input_ids=tokens.unsqueeze(0)).logits[0, first - 1 : -1] / 0.7
            expected = logits.log_softmax(-1).gather(1, tokens[first:, None])[:, 0].detach()
            found = torch.from_numpy(getattr(row.scores, name))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_first_weights_of_an_iteration_are_kept(model: str) -> None:
    spec = make_spec(loss={"correction": "decoupled"}, algorithm={"optimizer_steps": 2})
    learner, rows = TorchLearner(model, spec), rows_of(make_spec())
    needs = learner.loss.needs
    assert needs == Needs(before="iteration")

    def said() -> list[float]:
        return [float(row.scores.before.sum()) for row in scores(learner, rows)]  # type: ignore[union-attr]

    learner.begin_iteration()
    first = said()
    learner.accumulate(batches_of(spec, scores(learner, rows)))
    learner.step(1.0)
    assert said() == first
    learner.begin_iteration()
    assert said() != first


def test_the_critic_learns_what_comes(model: str) -> None:
    spec = make_spec(
        loss={"kind": "ppo", "value_learning_rate": 3e-3, "value_clip": 10.0},
        algorithm={"groups": 4, "group_size": 4, "learning_rate": 1e-9, "max_grad_norm": 1e9},
    )
    learner, rows = TorchLearner(model, spec), rows_of(spec)
    errors = []
    for _ in range(40):
        scored = scores(learner, rows)
        stats = learner.accumulate(batches_of(spec, scored))
        learner.step(total(rows, spec))
        errors.append(sum(stat.value_error for stat in stats))
    assert errors[-1] < 0.2 * errors[0]
    again = TorchLearner(model, spec)
    again.restore(learner.state())
    one, other = (scores(each, rows) for each in (learner, again))
    for left, right in zip(one, other, strict=True):
        assert (left.scores.values == right.scores.values).all()


def test_nobody_waits_for_a_critics_micro_batch_until_all_are_added(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU to read a number of one is to have nothing queued behind it."""
    spec = make_spec(
        loss={"kind": "ppo"}, algorithm={"groups": 4, "group_size": 4}, trainer={"least_microbatches": 3}
    )
    learner, calls = TorchLearner(model, spec), list[str]()
    assert learner._critic is not None
    for name in ("accumulate", "check"):
        plain = getattr(learner._critic.trained, name)

        def noted(*given: object, name: str = name, plain: Callable[..., object] = plain) -> object:
            calls.append(name)
            return plain(*given)

        monkeypatch.setattr(learner._critic.trained, name, noted)
    batches = batches_of(spec, scores(learner, rows_of(spec)))
    stats = learner.accumulate(batches)
    assert len(batches) > 1
    assert calls == ["accumulate"] * len(batches) + ["check"] * len(batches)
    assert all(one.returns > 0 for one in stats)


def test_masters_that_round_to_what_was_published_stay(model: str) -> None:
    """Another machine comes to other bits: what it published counts, and no more than that is lost."""
    spec = make_spec(model={"dtype": "bfloat16"})
    ours, theirs = TorchLearner(model, spec), TorchLearner(model, spec)
    for learner, seed in ((ours, 0), (theirs, 1)):
        torch.manual_seed(seed)
        learner.restore(
            {name: tensor + 1e-3 * torch.randn(tensor.shape) if name.startswith("weights.") else tensor
             for name, tensor in learner.state().items()}
        )  # fmt: skip
    before, published = ours.state(), theirs.weights()
    ours.adopt(published)
    assert digests_of(ours.weights()) == digests_of(published)
    kept = 0
    for name, tensor in published.items():
        master = ours.state()[f"weights.{name}"]
        same = before[f"weights.{name}"].bfloat16() == tensor
        assert torch.equal(master[same], before[f"weights.{name}"][same])
        kept += int(same.sum())
    assert kept > 100


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64), st.integers(0, 99))
def test_published_bits_are_met_exactly(patterns: list[int], seed: int) -> None:
    published = torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    master = published.float() * (1 + 1e-3 * torch.randn(len(patterns), generator=torch.manual_seed(seed)))
    found = closest(master, published).to(torch.bfloat16)
    finite = published == published
    assert torch.equal(found[finite].view(torch.int16), published[finite].view(torch.int16))
