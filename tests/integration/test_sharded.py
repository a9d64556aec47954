"""The learner fsdp: its bits on any number of ranks, a rank's share of a model, and others' checkpoints."""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from consumers.learners.forward import UnsupportedModel
from consumers.learners.gpu_room import GpuRoom
from consumers.learners.learner import Learner, TorchLearner
from consumers.learners.sharded import ShardedLearner
from consumers.losses.loss import Needs
from consumers.ranks.choose_learner import learner_of
from consumers.ranks.ranked_learner import RankedLearner
from consumers.steps.checkpoint import Checkpoints, RunPosition
from consumers.steps.state_parts import folder_of
from infra import choices
from infra.stores.opening import open_store
from infra.weights.digest import digests_of
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.integration.test_ranks import ALGORITHM, Straight, apart, learning, masters, spec_of
from tests.training import batches_of, rows_of, train

CASES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "critic": {"loss": {"kind": "ppo", "kl": 0.05}},
    "earlier": {  # asks for the weights that the iteration began with
        "algorithm": ALGORITHM | {"optimizer_steps": 3},
        "loss": {"kind": "ppo", "correction": "truncated", "correct_fresh": True},
    },
    "balanced": {"loss": {"kind": "tb"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "recomputed": {"trainer": {"gradient_checkpointing": True}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a width by which some ranks have fewer rows, and rows end amid a vector of a CPU."""
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), width=52))


def spec_in(case: str, ranks: int) -> RunSpec:
    said = CASES[case]
    trainer = {"least_microbatches": 3, "learner": "fsdp", "ranks": ranks, **said.get("trainer", {})}
    return make_spec(**{"algorithm": ALGORITHM, **said, "trainer": trainer})


def bits_after(model: str, spec: RunSpec) -> tuple[dict[str, str], list[float]]:
    """Digests of weights and moments after three steps, and the norms."""
    with learning(model, spec) as learner:
        norms = train(learner, spec, 3)
        check_shares(learner, spec)
        check_copies(learner)
        return all_but_rng(learner), norms


class Roomy(GpuRoom):
    """A GPU with room for all copies, which here is the CPU."""

    def fits(self, size: int) -> bool:
        return True


def check_copies(learner: Learner) -> None:
    """Copies on rank 0's own device, where a GPU has room, are those in main memory."""
    assert isinstance(learner, RankedLearner)
    there = learner.made()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learner._local._copies, "_gpu", Roomy(torch.device("cpu"), 1))
        here = learner.made()
    assert here.root == there.root
    copies = there.copy().result()
    for name, one in here.copy().result().items():
        assert torch.equal(one, copies[name])
        assert one.data_ptr() != copies[name].data_ptr()


def all_but_rng(learner: Learner) -> dict[str, str]:
    return digests_of({name: value for name, value in learner.state().items() if name != "rng"})


def check_shares(learner: Learner, spec: RunSpec) -> None:
    """This rank has its rows of each weight and no more, in all models."""
    ranks = spec.trainer.ranks
    assert isinstance(learner, RankedLearner)
    local = learner._local
    assert isinstance(local, ShardedLearner)
    assert (local._first is not None) == bool(getattr(spec.loss, "correct_fresh", False))
    models = [local._model, local._first, local._reference]
    if local._critic is not None:
        models.append(local._critic.trained._model)  # type: ignore[attr-defined]
    for model in models:
        for parameter in [] if model is None else model.parameters():
            assert isinstance(parameter, DTensor)
            assert parameter._local_tensor.shape[0] == -(-parameter.shape[0] // ranks)


@pytest.mark.thorough(but=["clipped"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_any_number_of_ranks(model: str, case: str) -> None:
    """More micro-batches than ranks, dealt out unequally, so that some ranks fill up."""
    plain = spec_in("clipped", 1)
    count = len(batches_of(plain, rows_of(plain)))
    assert count > 4
    assert count % 4
    expected = bits_after(model, spec_in(case, 1))
    for ranks in (2, 4) if case == "clipped" else (4,):
        assert bits_after(model, spec_in(case, ranks)) == expected


@pytest.mark.thorough
def test_moments_in_main_memory_change_no_bit(model: str) -> None:
    plain = spec_in("clipped", 2)
    offloaded = plain.model_copy(
        update={"trainer": plain.trainer.model_copy(update={"offload_optimizer": True})}
    )
    expected, state = bits_after(model, plain), dict[str, torch.Tensor]()
    for ranks in (1, 3):
        trainer = offloaded.trainer.model_copy(update={"ranks": ranks})
        spec = offloaded.model_copy(update={"trainer": trainer})
        with learning(model, spec) as learner:
            assert (train(learner, spec, 3), all_but_rng(learner)) == expected[::-1]
            check_shares(learner, spec)
            check_copies(learner)
            if state:
                train(learner, spec, 1)
                learner.restore(state)
                assert digests_of(learner.state()) == digests_of(state)
            state = learner.state()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.thorough(but=["1"])
def test_it_computes_what_torch_does(model: str, ranks: int) -> None:
    """To the bit, up to the norm by which a gradient is cut off; and each takes the other's checkpoints."""
    plain, ours = (spec_of(), spec_of(learner="fsdp", ranks=ranks))
    straight = Straight(model, plain)
    with learning(model, ours) as learner:
        assert train(learner, ours, 3) == pytest.approx(straight.norms[:3], rel=1e-4)
        straight.check_close(masters(learner), straight.third)
        own = learner.state()
        assert own.keys() == straight.state.keys()
        fourth = train(learner, ours, 1), digests_of(learner.weights())
        learner.restore(straight.state)
        assert digests_of(learner.state()) == digests_of(straight.state)
        assert digests_of(learner.weights()) == digests_of(straight.published)
        assert learner.made().root == learner.made().root
        assert train(learner, ours, 1) == pytest.approx(straight.norms[3:], rel=1e-4)
        straight.check_close(masters(learner), straight.fourth)
        learner.restore(own)
        assert (train(learner, ours, 1), digests_of(learner.weights())) == fourth
        learner.adopt({name: value + 1 for name, value in straight.published.items()})
        found = learner.weights()
    assert all(torch.equal(found[name], value + 1) for name, value in straight.published.items())
    taken = TorchLearner(model, plain)
    taken.restore(own)
    assert train(taken, plain, 1) == pytest.approx(fourth[0], rel=1e-4)


@pytest.mark.parametrize("loss", [{"kind": "ppo", "kl": 0.05}, {"kind": "tb"}], ids=lambda loss: loss["kind"])
@pytest.mark.thorough(but=["ppo"])
def test_an_adapter_has_the_bits_of_torch(model: str, loss: dict[str, Any]) -> None:
    """Beside a base that is shared out; with a critic, a reference and the iteration's first weights."""
    said = {"algorithm": ALGORITHM, "loss": loss, "model": {"lora": {"rank": 4}}}
    plain = make_spec(**said, trainer={"least_microbatches": 3})
    alone = TorchLearner(model, plain)
    expected = train(alone, plain, 3), all_but_rng(alone), alone.made().root
    for ranks in (1, 3):
        spec = make_spec(**said, trainer={"least_microbatches": 3, "learner": "fsdp", "ranks": ranks})
        with learning(model, spec) as learner:
            start = learner.state()
            for _ in range(2):
                norms = train(learner, spec, 3)
                assert (norms, all_but_rng(learner), learner.made().root) == expected
                learner.restore(start)
            assert isinstance(learner, RankedLearner)
            for one in learner._local._model.shards.values():
                assert one.local.shape[0] == min(one.most, one.shape[0] - one.first)


@pytest.mark.thorough
def test_an_adapter_of_a_bf16_run_is_close_to_that_of_torch(model: str) -> None:
    said = {"algorithm": ALGORITHM, "model": {"lora": {"rank": 4}, "dtype": "bfloat16"}}
    plain = make_spec(**said, trainer={"least_microbatches": 3})
    ours = make_spec(**said, trainer={"least_microbatches": 3, "learner": "fsdp", "ranks": 2})
    expected = train(TorchLearner(model, plain), plain, 3)
    with learning(model, ours) as learner:
        assert train(learner, ours, 3) == pytest.approx(expected, rel=5e-2)
        assert isinstance(learner, RankedLearner)
        types = {name: one.local.dtype for name, one in learner._local._model.shards.items()}
    assert {one for name, one in types.items() if ".layers." in name} == {torch.bfloat16}


def test_bf16_computes_what_torch_does(model: str) -> None:
    plain, ours = spec_of("bfloat16"), spec_of("bfloat16", learner="fsdp", ranks=2)
    expected, exact = Straight(model, plain), Straight(model, spec_of())
    with learning(model, ours) as learner:
        assert train(learner, ours, 3) == pytest.approx(expected.norms[:3], rel=5e-2)
        assert apart(masters(learner), expected.third) < 0.3 * apart(expected.third, exact.third)
        assert {one.dtype for one in learner.weights().values()} == {torch.bfloat16}


@pytest.mark.thorough
def test_float_sums_are_close(model: str) -> None:
    ours = spec_of(learner="fsdp", ranks=3, exact_sums=False)
    straight = Straight(model, spec_of())
    with learning(model, ours) as learner:
        assert train(learner, ours, 3) == pytest.approx(straight.norms[:3], rel=1e-4)
        straight.check_close(masters(learner), straight.third)


_LIBC = ctypes.CDLL("libc.so.6")
_FROM = -3  # M_MMAP_THRESHOLD: so many bytes and more get pages of their own


AT = RunPosition(iteration=0, step=0, root="r", positions={}, ledger=0, trainer_epoch=0)


class Watched:
    """The most memory that this process takes of its own while a block runs, beyond what it had before."""

    def __enter__(self) -> Watched:
        gc.collect()
        _LIBC.malloc_trim(0)  # else what was freed before would serve again
        _LIBC.mallopt(_FROM, 1 << 16)  # what is freed goes back, as it does for layers beyond 32 MiB
        self._over, self._before, self.most = threading.Event(), _own_memory(), 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.002):
            _LIBC.malloc_trim(0)  # layers that are freed into gaps of the heap would add up there
            self.most = max(self.most, _own_memory() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        _LIBC.mallopt(_FROM, 32 << 20)


def _own_memory() -> int:
    """Memory without that of mapped files, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.thorough
def test_no_rank_holds_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it loads one, nor while it computes."""
    monkeypatch.setenv(choices.LINEAR.variable, "mkl")  # the kernels of oneDNN take more than this model
    small = make_tiny_model(tmp_path / "small", width=512, layers=1)
    large = make_tiny_model(tmp_path / "large", width=512, layers=20)
    whole = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert whole > 100 << 20
    spec = make_spec(trainer={"learner": "fsdp", "ranks": 4, "exact_sums": False})
    zero = make_spec(trainer={"learner": "deepspeed", "zero_stage": 3, "ranks": 4})
    with learning(str(small), spec) as one:  # so that all code is loaded, and MKL has its buffers
        one.score([rows_of(spec)], Needs(before="step"))
        train(one, spec, 1)
    del one
    with Watched() as loading:
        large_one = learner_of(str(large), spec, run="test-1", log=logging.getLogger("streamrl.test"))
    with Watched() as scoring:
        large_one.score([rows_of(spec)], Needs(before="step"))
    with Watched() as training:
        train(large_one, spec, 1)
    checkpoints = Checkpoints(open_store(f"file://{tmp_path}"), "test-1")
    with Watched() as saving:
        place = checkpoints.place(0, 0)
        checkpoints.save(checkpoints.begin(large_one.snapshot(place), place), AT, keep=1)
    with Watched() as restoring:
        assert checkpoints.restored(large_one.restore, print)
    large_one.close()
    assert loading.most < 0.6 * whole
    assert scoring.most < 0.4 * whole
    assert training.most < 0.95 * whole, "a quarter of the gradient and both moments, and a layer of each"
    assert saving.most < 0.4 * whole, "some pieces; the state is three times the model"
    assert restoring.most < 0.4 * whole
    with learning(str(small), zero):
        pass
    with Watched() as loading, learning(str(large), zero):
        pass
    assert loading.most < 0.95 * whole, "a quarter of the weights, of DeepSpeed's copy and of the gradient"


def test_each_rank_writes_and_reads_its_part_of_a_checkpoint(model: str, tmp_path: Path) -> None:
    """Critic and all; by another learner on another number of ranks, too, and by learner torch."""
    store, loss = open_store(f"file://{tmp_path}"), CASES["critic"]["loss"]
    checkpoints, told = Checkpoints(store, "test-1"), list[str]()

    def save(learner: Learner, iteration: int) -> dict[str, str]:
        place = checkpoints.place(iteration, 0)
        expected, taken = digests_of(learner.state()), learner.snapshot(place)
        train(learner, spec, 1)  # what is written is what was
        checkpoints.save(checkpoints.begin(taken, place), replace(AT, iteration=iteration), keep=9)
        return expected

    def restored(spec: RunSpec) -> dict[str, str]:
        with learning(model, spec) as one:
            assert checkpoints.restored(one.restore, told.append)
            return digests_of(one.state())

    def sharing(learner: str, ranks: int) -> RunSpec:
        trainer = {"least_microbatches": 3, "learner": learner, "ranks": ranks}
        trainer |= {"zero_stage": 3} if learner == "deepspeed" else {}
        return make_spec(algorithm=ALGORITHM, loss=loss, trainer=trainer)

    spec = sharing("deepspeed", 3)
    with learning(model, spec) as one:
        states = [save(one, iteration) for iteration in range(3)]
        assert checkpoints.restored(one.restore, told.append)
        assert digests_of(one.state()) == states[2]
        train(one, spec, 1)
    files = sorted((tmp_path / folder_of(checkpoints.place(2, 0))).glob("state-*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 3
    assert max(sizes) < 0.5 * sum(sizes)
    assert restored(sharing("fsdp", 2)) == restored(make_spec(algorithm=ALGORITHM, loss=loss)) == states[2]
    assert not told
    raw = bytearray(files[2].read_bytes())
    raw[-5] ^= 1
    files[2].write_bytes(raw)
    assert restored(spec) == states[1], "rank 2 alone notices it"
    assert "state-00002.safetensors has other bits" in told[0]


def test_a_weight_that_no_file_has_is_named(tmp_path: Path) -> None:
    torn = make_tiny_model(tmp_path / "torn")
    tensors = load_file(torn / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, torn / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight of shape \[64\] the folder has none"):
        learner_of(str(torn), spec_of(learner="fsdp"), run="test-1", log=logging.getLogger("streamrl.test"))
