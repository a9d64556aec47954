"""AdamW with moments in main memory: the same bits, and the same checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from consumers.learners.learner import TorchLearner
from infra.weights.digest import digests_of
from schemas.runspec import RunSpec
from tests.factories import make_spec, make_tiny_model
from tests.training import batches_of, rows_of, total, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def spec_of(*, offloaded: bool, **sections: Any) -> RunSpec:
    algorithm = {"warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return make_spec(algorithm=algorithm, trainer={"offload_optimizer": offloaded}, **sections)


@pytest.mark.parametrize("sections", [{}, {"loss": {"kind": "ppo"}}, {"model": {"lora": {"rank": 4}}}])
def test_the_same_bits_and_fingerprints(model: str, sections: dict[str, Any]) -> None:
    found = []
    for offloaded in (False, True):
        spec = spec_of(offloaded=offloaded, **sections)
        torch.manual_seed(0)  # a state has the dice
        one = TorchLearner(model, spec)
        train(one, spec, 2)
        rows = rows_of(spec)
        (scored,) = one.score([rows], one.loss.needs)
        one.accumulate(batches_of(spec, scored))
        found.append((one.step(total(rows, spec)), digests_of(one.state())))
    assert found[0] == found[1]


@pytest.mark.parametrize("steps", [0, 2])
def test_each_goes_on_from_the_others_checkpoint(model: str, steps: int) -> None:
    plain, offloaded = (TorchLearner(model, spec_of(offloaded=one)) for one in (False, True))
    train(plain, spec_of(offloaded=False), steps)
    state = plain.state()
    train(offloaded, spec_of(offloaded=True), 1)  # what it has by now is overwritten
    offloaded.restore(state)
    assert digests_of(offloaded.state()) == digests_of(state)
    for one in (plain, offloaded):
        train(one, spec_of(offloaded=False), 1)
    assert digests_of(offloaded.state()) == digests_of(plain.state())
    again = TorchLearner(model, spec_of(offloaded=False))
    again.restore(offloaded.state())
    assert digests_of(again.state()) == digests_of(plain.state())


class Frozen(TorchLearner):
    """A learner of one's own that leaves a layer as it is, as docs/extending/learner.md has it."""

    def _backward(self, loss: torch.Tensor) -> torch.Tensor | float:
        loss.backward()  # type: ignore[no-untyped-call]
        for name, tensor in self._named.items():
            if "layers.1" in name:
                if tensor.grad is not None:
                    tensor.grad.zero_()
                tensor.grad = None
        return self._policy.accumulate()


def test_a_parameter_without_a_gradient_has_no_moments_and_others_keep_theirs(model: str) -> None:
    """Also when a learner that trains all goes on from there."""
    states = []
    for offloaded in (False, True):
        spec = spec_of(offloaded=offloaded)
        frozen, whole = Frozen(model, spec), TorchLearner(model, spec)
        train(frozen, spec, 2)
        train(whole, spec, 1)
        whole.restore(frozen.state())
        assert digests_of(whole.state()) == digests_of(frozen.state())
        train(whole, spec, 2)
        states.append((digests_of(frozen.state()), digests_of(whole.state())))
    assert states[0] == states[1]


def test_a_snapshot_is_of_the_moment_at_which_it_was_taken(model: str) -> None:
    spec = spec_of(offloaded=True)
    one = TorchLearner(model, spec)
    train(one, spec, 1)
    expected, taken = digests_of(one.state()), one.snapshot()
    train(one, spec, 1)
    read: dict[str, bytes] = {}
    for name, piece in taken.pieces():
        read[name] = read.get(name, b"") + bytes(piece)
    again = TorchLearner(model, spec)
    train(again, spec, 1)
    assert {name: len(raw) for name, raw in read.items()} == {
        name: tensor.nbytes for name, tensor in again.state().items()
    }
    moments = {name: raw for name, raw in read.items() if "exp_avg" in name}
    assert moments
    for name, raw in moments.items():
        assert raw == again.state()[name].numpy().tobytes(), name
    assert expected == digests_of(again.state())


def test_deepspeed_offloads_from_stage_1_on() -> None:
    trainer = {"learner": "deepspeed", "offload_optimizer": True}
    make_spec(trainer={**trainer, "zero_stage": 1})
    with pytest.raises(ValidationError, match=r"offload_optimizer needs zero_stage 1, 2 or 3"):
        make_spec(trainer={**trainer, "zero_stage": 0})
