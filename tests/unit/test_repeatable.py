"""Sums that are repeatable on a GPU: switched on with exact sums, and what can't be is named."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from consumers.learners.repeatable import NotRepeatable, named_if_not_repeatable, repeat_sums


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


def test_what_is_not_repeatable_is_named(switched_back: None) -> None:
    @named_if_not_repeatable()
    def compute(what: str) -> None:
        raise RuntimeError(what)

    with pytest.raises(NotRepeatable, match=r"kthvalue.*set trainer.exact_sums to false"):
        compute("kthvalue CUDA does not have a deterministic implementation")
    with pytest.raises(RuntimeError, match="out of memory"):
        compute("out of memory")
