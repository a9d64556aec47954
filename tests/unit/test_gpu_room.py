"""Copies of weights stay on a GPU only where they have room beside all that training needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from consumers.learners import learner
from consumers.learners.gpu_room import GpuRoom
from consumers.learners.learner import TorchLearner
from consumers.learners.lending import Copies, Lent
from consumers.learners.zero import DeepSpeedLearner
from tests.factories import make_spec, make_tiny_model

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "fits"),
    [
        (38, 40, 60, True),  # 80 GiB, of which 2 are taken beside tensors: 3 copies of 2 fit beside 60
        (38, 40, 64, False),  # steps need more than is reserved now
        (30, 40, 60, False),  # another process is there
    ],
)  # fmt: skip
def test_copies_that_fit(
    free: int, reserved: int, peak: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("mem_get_info", (free * GIB, 80 * GIB)), ("memory_reserved", reserved * GIB),
        ("max_memory_reserved", peak * GIB),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    room = GpuRoom(torch.device("cuda"), 3)
    for _ in range(2):
        assert not room.fits(2 * GIB)  # before the first step nobody knows what steps need
    room.stepped()
    assert room.fits(2 * GIB) == fits
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0 if not fits else 80 * GIB)
    assert room.fits(2 * GIB) == fits  # the answer stays: copies of two places at a time would cost more

    monkeypatch.setenv("STREAMRL_COPIES", "memory")
    forced = GpuRoom(torch.device("cuda"), 3)
    forced.stepped()
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    assert not forced.fits(2 * GIB)


@pytest.mark.parametrize("kind", ["disaggregated", "colocated"])
def test_copies_leave_a_gpu_to_engines_that_take_turns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that sleeps takes next to nothing, and in its turn it needs what it had before."""

    def on_gpu(dtype: torch.dtype, lent: Lent, device: torch.device, **said: Any) -> Copies:
        return Copies(dtype, lent, torch.device("cuda"), **said)

    monkeypatch.setattr(learner, "Copies", on_gpu)
    made = TorchLearner(str(make_tiny_model(tmp_path / "model")), make_spec(placement={"kind": kind}))
    assert (made._copies._gpu is None) == (kind == "colocated")


def test_deepspeed_says_that_a_step_was_taken() -> None:
    """Before it is known what a step needs, no copy stays on a GPU."""
    steps, made = list[None](), DeepSpeedLearner.__new__(DeepSpeedLearner)
    made._spec, made._lent, made._critic, made._stage = make_spec(), Lent(), None, 1
    made._steps, made._computed = 0, True
    made._optimizer = SimpleNamespace(param_groups=[])
    made._engine = SimpleNamespace(step=lambda: None, get_global_grad_norm=lambda: 1.0)
    made._copies = SimpleNamespace(stepped=lambda: steps.append(None))  # type: ignore[assignment]
    assert made.step(1.0).norm == 1.0
    assert len(steps) == 1
