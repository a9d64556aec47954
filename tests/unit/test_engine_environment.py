"""The environment that vLLM reads: on a GPU it compiles, and is batch-invariant as the run file says."""

from __future__ import annotations

import os

import pytest

from infra import choices
from producers.engines.vllm_in_process import prepare_environment


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", found)
    return found


@pytest.mark.parametrize("invariant", [True, False])
def test_on_a_gpu(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, invariant: bool) -> None:
    monkeypatch.setattr(choices, "cuda", lambda: True)
    environment["VLLM_BATCH_INVARIANT"] = str(int(not invariant))
    prepare_environment(4, batch_invariant=invariant)
    assert environment["VLLM_BATCH_INVARIANT"] == str(int(invariant))
    assert "TORCHDYNAMO_DISABLE" not in environment
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_on_a_cpu(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "cuda", lambda: False)
    prepare_environment(4, batch_invariant=True)
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert "VLLM_BATCH_INVARIANT" not in environment
    assert "CUDA_VISIBLE_DEVICES" not in environment
    environment["STREAMRL_DEVICE"] = "cpu"
    prepare_environment(4, batch_invariant=True)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
