"""Sums that are repeatable on a GPU: switched on with exact sums, and what can't be is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from consumers.learners import forward
from consumers.learners.learner import TorchLearner
from consumers.learners.repeatable import NotRepeatable, named_if_not_repeatable, repeat_sums
from consumers.losses.loss import Needs
from tests.factories import make_spec, make_tiny_model


@pytest.fixture
def switched_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_on_a_gpu_torch_computes_the_same_bits_each_time(switched_back: None) -> None:
    repeat_sums(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    repeat_sums(torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    for own, then in ((":16:8", ":16:8"), (":0:0", ":4096:8")):  # torch refuses all but two
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = own
        repeat_sums(torch.device("cuda"))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == then


def test_what_is_not_repeatable_is_named(switched_back: None) -> None:
    @named_if_not_repeatable()
    def compute(what: str) -> None:
        raise RuntimeError(what)

    with pytest.raises(NotRepeatable, match=r"kthvalue.*set trainer.exact_sums to false"):
        compute("kthvalue CUDA does not have a deterministic implementation")
    with pytest.raises(RuntimeError, match="out of memory"):
        compute("out of memory")


def test_so_it_is_while_a_model_is_loaded_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("kthvalue CUDA does not have a deterministic implementation")

    model = str(make_tiny_model(tmp_path))
    learner = TorchLearner(model, make_spec())
    monkeypatch.setattr(learner, "_logprobs", refused)
    with pytest.raises(NotRepeatable):
        learner.ask(MagicMock(), Needs(before="step"))
    monkeypatch.setattr(forward, "_as_it_is", refused)
    with pytest.raises(NotRepeatable):
        TorchLearner(model, make_spec())
