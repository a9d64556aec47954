"""Learners over processes: each ZeRO stage against plain torch, resumed elsewhere; ranks that are killed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor

from consumers.batches.micro_batches import micro_batch
from consumers.batches.training_rows import TrainingRow
from consumers.learners.learner import Learner, TorchLearner
from consumers.learners.sharded_model import ShardedModel
from consumers.learners.zero import DeepSpeedLearner
from consumers.ranks.choose_learner import learner_of
from consumers.ranks.member import RankDied
from consumers.ranks.ranked_learner import RankedLearner
from consumers.replay import Again
from infra import runs
from infra.ranks.rank_addresses import RanksError
from infra.route_shapes import route_shape
from infra.weights.digest import digests_of
from schemas.expert_routes import pack_routes
from schemas.runspec import RunSpec
from schemas.stages import Stage
from tests.factories import make_context, make_sample, make_spec, make_tiny_mixture, make_tiny_model
from tests.fakes.crashing import World
from tests.harness import running, trained_ids
from tests.stacks import words_of
from tests.training import train
from tests.waiting import wait_until

# All that a step does: warm up, decay, clip (every norm here is larger), over unequal micro-batches.
ALGORITHM = {
    "groups": 6, "group_size": 4, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
    "learning_rate": 1e-4,
}  # fmt: skip
DTYPES = ("float32", "bfloat16")
# How far weights may be from TorchLearner's, as a part of how far they moved: the order of sums differs, and
# Adam makes much of it where a gradient is nearly zero.
TOLERANCE = 2e-3


def spec_of(dtype: str = "float32", **trainer: Any) -> RunSpec:
    return make_spec(
        algorithm=ALGORITHM, model={"dtype": dtype}, trainer={"least_microbatches": 3, **trainer}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wide enough for ZeRO-3 to really divide some of its weights."""
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), width=320))


@contextmanager
def learning(model: str, spec: RunSpec) -> Iterator[Learner]:
    learner = learner_of(model, spec, run="test-1", log=logging.getLogger("streamrl.test"))
    try:
        yield learner
    finally:
        learner.close()


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    """The weights that are trained, in fp32."""
    state = learner.state()
    return {name: value for name, value in state.items() if name.startswith("weights.")}


class Straight:
    """TorchLearner by itself: four steps, and its state after three."""

    def __init__(self, model: str, spec: RunSpec) -> None:
        learner = TorchLearner(model, spec)
        self.start = masters(learner)
        self.norms = train(learner, spec, 3)
        self.state, self.published = learner.state(), learner.weights()
        self.third = masters(learner)
        self.norms += train(learner, spec, 1)
        self.fourth = masters(learner)

    def check_close(self, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Compared with how far they moved."""
        assert apart(found, expected) < TOLERANCE * apart(expected, self.start)


def apart(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """How far some weights are from others."""
    assert some.keys() == others.keys()
    assert {tensor.dtype for tensor in some.values()} == {torch.float32}
    return float(torch.cat([(some[name] - others[name]).flatten() for name in some]).norm())


@pytest.fixture(scope="module")
def straight(model: str) -> dict[str, Straight]:
    """By dtype; computed before this process is one of several ranks."""
    return {dtype: Straight(model, spec_of(dtype)) for dtype in DTYPES}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.thorough(but=["3-2"])
def test_zero_computes_what_torch_does(
    model: str, straight: dict[str, Straight], stage: int, ranks: int
) -> None:
    """And goes on from its checkpoint, as from its own: there with the same bits."""
    expected = straight["float32"]
    spec = spec_of(learner="deepspeed", zero_stage=stage, ranks=ranks)
    shared = set(Path("/dev/shm").iterdir())
    linear = torch.nn.functional.linear
    with learning(model, spec) as learner:
        assert train(learner, spec, 3) == pytest.approx(expected.norms[:3], rel=1e-4)
        expected.check_close(masters(learner), expected.third)
        own = learner.state()
        assert own.keys() == expected.state.keys()
        train(learner, spec, 1)
        fourth = learner.weights()
        learner.restore(expected.state)
        assert digests_of(learner.weights()) == digests_of(expected.published)
        assert train(learner, spec, 1) == pytest.approx(expected.norms[3:], rel=1e-4)
        expected.check_close(masters(learner), expected.fourth)
        learner.restore(own)
        train(learner, spec, 1)
        assert digests_of(learner.weights()) == digests_of(fourth)
    left = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer*")) - shared
    assert not left
    assert torch.nn.functional.linear is linear


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 2)])
@pytest.mark.thorough
def test_bf16_computes_what_torch_does(
    model: str, straight: dict[str, Straight], stage: int, ranks: int
) -> None:
    """Weights may round the other way: that moves them less than all the rounding that bf16 does."""
    expected = straight["bfloat16"]
    rounding = apart(expected.third, straight["float32"].third)
    spec = spec_of("bfloat16", learner="deepspeed", zero_stage=stage, ranks=ranks)
    with learning(model, spec) as learner:
        assert train(learner, spec, 3) == pytest.approx(expected.norms[:3], rel=5e-2)
        assert apart(masters(learner), expected.third) < 0.3 * rounding
        published = learner.weights()
        assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
        for name, tensor in masters(learner).items():
            assert torch.equal(published[name.removeprefix("weights.")], tensor.bfloat16()), name


@pytest.mark.thorough
def test_ranks_compute_logits_in_different_numbers_of_chunks(
    model: str, straight: dict[str, Straight]
) -> None:
    """With ZeRO-3 they waited for each other for ever: its ranks must call the same modules."""
    spec = spec_of(learner="deepspeed", zero_stage=3, ranks=2, logits_chunk=7)
    with learning(model, spec) as learner:
        assert train(learner, spec, 2) == pytest.approx(straight["float32"].norms[:2], rel=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.thorough
def test_zero_with_moments_in_main_memory(model: str, straight: dict[str, Straight], stage: int) -> None:
    expected = straight["float32"]
    spec = spec_of(learner="deepspeed", zero_stage=stage, ranks=2, offload_optimizer=True)
    with learning(model, spec) as learner:
        assert train(learner, spec, 3) == pytest.approx(expected.norms[:3], rel=1e-4)
        expected.check_close(masters(learner), expected.third)
        learner.restore(expected.state)
        assert train(learner, spec, 1) == pytest.approx(expected.norms[3:], rel=1e-4)
        expected.check_close(masters(learner), expected.fourth)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.thorough(but=["3"])
def test_a_state_fits_another_number_of_ranks(model: str, straight: dict[str, Straight], stage: int) -> None:
    """Of three ranks, where parts are filled up; then in a process that starts anew, by itself, on torch."""
    three = spec_of(learner="deepspeed", zero_stage=stage, ranks=3)
    with learning(model, three) as learner:
        learner.restore(straight["float32"].state)
        state = learner.state()
    for name, tensor in straight["float32"].state.items():
        assert torch.equal(state[name], tensor), name
    plain = TorchLearner(model, spec_of())
    plain.restore(state)
    train(plain, spec_of(), 1)
    assert digests_of(masters(plain)) == digests_of(straight["float32"].fourth)


@pytest.mark.thorough
def test_torch_computes_the_same_bits_on_three_ranks(model: str, straight: dict[str, Straight]) -> None:
    spec = spec_of(ranks=3)
    with learning(model, spec) as learner:
        train(learner, spec, 3)
        assert digests_of(masters(learner)) == digests_of(straight["float32"].third)


@pytest.mark.thorough
def test_a_critic_and_earlier_weights_beside_deepspeed(model: str, straight: object) -> None:
    """ZeRO-3 has to gather what the loss asks of the step's own weights, on all ranks at once."""
    iteration = ALGORITHM | {"optimizer_steps": 3}  # so that its first weights are not those of each step
    corrected = {"kind": "ppo", "kl": 0.05, "correction": "truncated", "correct_fresh": True}
    for algorithm, loss, beside in (
        (iteration, corrected, {"reference", "first", "critic"}),
        (ALGORITHM, {"kind": "tb"}, {"reference"}),
    ):
        trainer: dict[str, Any] = {"least_microbatches": 3}
        alone = Straight(model, make_spec(algorithm=algorithm, loss=loss, trainer=trainer))
        trainer |= {"learner": "deepspeed", "zero_stage": 3, "ranks": 2}
        spec = make_spec(algorithm=algorithm, loss=loss, trainer=trainer)
        with learning(model, spec) as learner:
            assert train(learner, spec, 3) == pytest.approx(alone.norms[:3], rel=1e-3)
            alone.check_close(masters(learner), alone.third)
            check_shares_beside_zero(learner, beside)


def check_shares_beside_zero(learner: Learner, expected: set[str]) -> None:
    """This rank has its rows of each weight and no more, in all models beside the policy."""
    assert isinstance(learner, RankedLearner)
    local = learner._local
    assert isinstance(local, DeepSpeedLearner)
    models = {"reference": local._reference, "first": local._first}
    if local._critic is not None:
        models["critic"] = local._critic.trained._model  # type: ignore[attr-defined]
    assert {name for name, model in models.items() if model is not None} == expected
    for name in expected:
        assert isinstance(models[name], ShardedModel), name
        for parameter in models[name].parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter._local_tensor.shape[0] == -(-parameter.shape[0] // learner._ranks), name


def test_the_end_of_a_rank_is_told_at_once(model: str, straight: object) -> None:
    spec = spec_of(ranks=2)
    with learning(model, spec) as learner:
        (rank,) = rank_processes(psutil.Process())
        learner.check()
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(RankDied) as caught:
            train(learner, spec, 1)
        with pytest.raises(RanksError, match=rf"rank 1 \(process {rank.pid}\) ended before it wrote"):
            learner.check()
    story = str(caught.value)
    assert f"rank 1 (process {rank.pid}) was killed by SIGKILL" in story
    assert "rank 1 of 2" in story, "the last lines of its log"


@pytest.mark.parametrize(
    ("trainer", "exact", "silent"),
    [
        ({}, True, set()),
        ({"exact_sums": False}, False, set()),
        ({"learner": "deepspeed", "zero_stage": 2}, False, {Stage.GRADIENT, Stage.OPTIMIZER}),
        ({"learner": "fsdp"}, True, set()),
    ],
    ids=["torch", "float sums", "deepspeed", "fsdp"],
)
@pytest.mark.thorough
def test_their_steps_are_taken_again(
    tmp_path: Path, model: str, trainer: dict[str, Any], exact: bool, silent: set[Stage]
) -> None:
    """Equal bits where sums are exact; else within the tolerances of the record, which says why."""
    spec = spec_of(ranks=2, checkpoint_every=2, **trainer)
    context = make_context(spec, tmp_path)
    runs.create(context.store, spec, bootstrap_servers="none", model=model, topics=set(), run_id="test-1")
    world = World(context, model)
    with learning(model, spec) as learner:
        world.learner_of = lambda: learner
        world.live()
    again = Again(
        context, lambda: learner_of(model, spec, run="test-1", log=context.log), lambda done, total: None
    )
    try:
        found = list(again.each(0, len(world.ledger()) - 1))
    finally:
        again.close()
    assert len(found) == spec.algorithm.iterations
    for step in found:
        assert {one.stage for one in step.stages if one.equal is None} == silent
        assert step.as_expected
        assert step.equal or not exact
        assert step.may_differ != exact
        assert exact or "Its ranks add gradients as floats" in step.reason


def rank_processes(trainer: psutil.Process) -> list[psutil.Process]:
    return [child for child in trainer.children() if "consumers.ranks.rank" in words_of(child)]


@pytest.mark.parametrize("learner", ["deepspeed", "fsdp"])
@pytest.mark.thorough
def test_a_run_goes_on_after_a_rank_was_killed(tmp_path: Path, kafka: str, model: str, learner: str) -> None:
    """The trainer says which rank it was and ends; started again it takes the same steps to the same bits."""
    spec = make_spec(
        algorithm={"iterations": 8, "groups": 8, "group_size": 4, "learning_rate": 3e-3},
        trainer={"checkpoint_every": 100, "bundle_tokens": 64, "learner": learner, "ranks": 2},
    )
    with running(tmp_path, kafka, spec, Path(model)) as run:
        run.wait_for_steps(2)
        trainer = run.processes["trainer-0"]
        with run.standing_still("generator-0"):
            (rank,) = rank_processes(psutil.Process(trainer.pid))
            rank.send_signal(signal.SIGKILL)
            wait_until(lambda: trainer.poll() is not None, what="the trainer's end")
        assert trainer.returncode == 1
        log = run.log("trainer-0").read_text()
        assert f"rank 1 (process {rank.pid}) was killed by SIGKILL" in log
        assert "Traceback" not in log
        run.start("trainer")
        run.wait_for_end()
        ids = sorted(trained_ids(run.steps()))
        assert ids == [(group, index) for group in range(64) for index in range(4)]
        log = run.log("trainer-0").read_text()
        assert "taken again from the ledger" in log
        assert "has other bits" not in log
        assert not run.dead_letters()


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [
        ("qwen3_moe", {"zero_stage": 1, "ranks": 2}),
        ("qwen3_moe", {"zero_stage": 3, "ranks": 2}),
        ("mixtral", {"learner": "fsdp", "ranks": 3}),
    ],
)
@pytest.mark.thorough(but=["mixtral-trainer2"])
def test_ranks_follow_routes_as_torch_does(kind: str, trainer: dict[str, Any], tmp_path: Path) -> None:
    mixture = str(make_tiny_mixture(tmp_path / "mixture", kind))
    shape, draw = route_shape(mixture), np.random.default_rng(0)
    assert shape is not None
    rows = []
    for index in range(4):
        sample = make_sample(spec_of(), 0, index, length=6 + index)
        tokens = sample.prompt_tokens.size + sample.tokens.size - 1
        order = draw.random((tokens, shape.layers, shape.experts)).argsort(axis=-1)[..., : shape.taken]
        routes = pack_routes(np.sort(order, axis=-1).astype(shape.dtype))
        rows.append(TrainingRow(replace(sample, routes=routes), 0, index))

    def taught(learner: Learner, some: list[TrainingRow]) -> tuple[list[list[float]], float]:
        """Train two micro-batches; return the means of their logprobs, and the gradient's norm."""
        parts = (some[:2], some[2:])
        batches = [micro_batch(part, [np.ones(1)] * 2, learner.loss, 0) for part in parts]
        return [stats.means for stats in learner.accumulate(batches)], learner.step(10.0).norm

    # computed before this process is one of several ranks
    means, norm = taught(TorchLearner(mixture, spec_of()), rows)
    unrouted = [replaced(row, sample=replace(row.sample, routes=b"")) for row in rows]
    free, _ = taught(TorchLearner(mixture, spec_of()), unrouted)
    assert not np.allclose(means, free, rtol=1e-3)
    with learning(mixture, spec_of(**{"learner": "deepspeed", **trainer})) as learner:
        found, its_norm = taught(learner, rows)
    np.testing.assert_allclose(found, means, rtol=1e-5)
    assert its_norm == pytest.approx(norm, rel=1e-4)
