"""The learner on a GPU: bits that do not depend on order or chance, and attention in one call."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from consumers.batches import packing, varlen_attention
from consumers.learners import gpu_room
from consumers.learners.fixed_point import FixedPointSum
from consumers.learners.learner import TorchLearner
from consumers.ranks.choose_learner import learner_of
from infra.weights.digest import digests_of, root_digest
from tests.factories import make_spec, make_tiny_model
from tests.training import batches_of, rows_of, taken, total, train

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_in_any_order(model: str, dtype: str) -> None:
    spec = make_spec(
        model={"dtype": dtype}, algorithm={"groups": 32, "group_size": 8}, trainer={"microbatch_tokens": 400}
    )
    rows = rows_of(spec)
    found = set()
    for seed in range(4):
        batches = batches_of(spec, rows, 400)
        random.Random(seed).shuffle(batches)
        learner = TorchLearner(model, spec)
        learner.accumulate(batches)
        learner.step(total(rows, spec))
        found.add(str(sorted(digests_of(learner.weights()).items())))
    assert len(found) == 1


def give_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may run on the GPU: have room for copies beside them."""
    for bound in ("_CONTEXT", "_SPARE"):
        monkeypatch.setattr(gpu_room, bound, 1 << 60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_share_a_model_out(
    model: str, dtype: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, each on its own GPU; with the norms of one that has the whole model.

    Copies of the whole stay on rank 0's GPU.
    """
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    give_room(monkeypatch)
    said = {"model": {"dtype": dtype}, "algorithm": {"groups": 16, "group_size": 4}}
    plain = make_spec(**said, trainer={"least_microbatches": 3})
    norms = train(TorchLearner(model, plain), plain, 3)
    bits = set()
    for count in (1, ranks):
        spec = make_spec(**said, trainer={"least_microbatches": 3, "learner": "fsdp", "ranks": count})
        learner = learner_of(model, spec, run="test-1", log=logging.getLogger("streamrl.test"))
        try:
            assert train(learner, spec, 3) == pytest.approx(norms, rel=0.1 if dtype == "bfloat16" else 1e-3)
            made = learner.made()
            assert all(one.is_cuda for one in made.copy().result().values())
            bits.add(made.root)
            bits.add(root_digest(digests_of(learner.weights())))
        finally:
            learner.close()
    assert len(bits) == 1


def test_activations_that_are_computed_again(model: str) -> None:
    """Also where the first layer tries the kernel of attention."""
    varlen_attention.takes_groups.cache_clear()
    roots = set()
    for again in (True, False):
        spec = make_spec(model={"dtype": "bfloat16"}, trainer={"gradient_checkpointing": again})
        learner = TorchLearner(model, spec)
        train(learner, spec, 2)
        roots.add(learner.made().root)
    assert len(roots) == 1


@pytest.mark.parametrize("stepped", [False, True])
def test_weights_are_brought_and_hashed(model: str, stepped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To main memory before the first step, and after it to the GPU, where there is room."""
    give_room(monkeypatch)
    spec = make_spec(model={"dtype": "bfloat16"})
    learner = TorchLearner(model, spec)
    if stepped:
        train(learner, spec, 1)
    made = [learner.made() for _ in range(5)]  # more than there are rooms
    weights = learner.weights()
    assert {one.root for one in made} == {root_digest(digests_of(weights))}
    copy = made[0].copy().result()
    assert all(one.is_cuda == stepped and one.is_pinned() != stepped for one in copy.values())
    train(learner, spec, 1)
    assert learner.made().root != made[0].root
    assert copy.keys() == weights.keys()
    assert all(torch.equal(copy[name].cpu(), weight) for name, weight in weights.items())


def test_attention_in_one_call_is_that_of_grids() -> None:
    torch.manual_seed(0)
    packed = packing.pack_sequences([3, 7, 7, 200, 1000]).to(CUDA)
    query, key, value = qkv = [
        torch.randn(1, heads, packed.tokens, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    ]
    results: list[tuple[torch.Tensor, ...]] = []
    for fits in (varlen_attention.fits, lambda query: False):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(varlen_attention, "fits", fits)
            assert varlen_attention.fits(query) == (not results)
            out, _ = packing._attention(
                torch.nn.Module(), query, key, value, None, packing=packed, scaling=0.125
            )
        results.append((out, *torch.autograd.grad(out.float().square().sum(), qkv)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_exact_sums_are_those_of_a_cpu() -> None:
    gradients = [torch.randn(100_000, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    means = []
    for device in (CUDA, torch.device("cpu")):
        one = FixedPointSum(100_000, device)
        assert all(taken(one, gradient.to(device, copy=True)) for gradient in gradients)
        mean = torch.empty(100_000, device=device)
        one.mean_into(mean, 7.0)
        means.append(mean.cpu())
    assert torch.equal(*means)
