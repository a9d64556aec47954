"""Fused operations on a GPU compute what they compute in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from consumers.learners.fingerprint import fingerprint
from tests.kernels import test_fused, test_gpu_draw


@pytest.mark.parametrize(
    "work", [test_fused.norm, test_fused.gate, test_fused.rotation, test_fused.logprobs, test_fused.model]
)
def test_as_transformers(work: Callable[[], None]) -> None:
    with torch.device("cuda"):
        work()


@pytest.mark.parametrize("work", [test_gpu_draw.draw, test_gpu_draw.edges, test_gpu_draw.unlikely])
def test_draws(work: Callable[[], None]) -> None:
    with torch.device("cuda"):
        work()


def test_fingerprints_of_vectors_there() -> None:
    vector = torch.randn(3_000_001, device="cuda")
    ours, other = fingerprint([vector]), vector.clone()
    assert fingerprint(vector.split(1_000_000)).digest == ours.digest
    other[-1] += 1
    theirs = fingerprint([other])
    assert theirs.digest != ours.digest
    assert fingerprint([vector.cpu()]).size == pytest.approx(ours.size, rel=1e-5)
