"""Weights scanned, changed and hashed on a GPU: the same chunks, and the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from infra.weights.bits import Bits
from infra.weights.codec import chunks
from infra.weights.codec.scan import SCAN_VARIABLE


@pytest.mark.parametrize("changed", [0.0, 0.003, 0.03, 0.3])
def test_chunks_are_those_of_the_compiled_scan(changed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, old, new = np.random.default_rng(0), {}, {}
    for name, shape in (("a", (1500, 2048)), ("b", (70_000, 64)), ("c", (777,)), ("d", (1,))):
        weights = rng.normal(0, 0.02, shape).astype(np.float32).reshape(-1)
        before = (weights.view(np.uint32) >> 16).astype(np.uint16)
        after = np.where(rng.random(before.size) < changed, before + rng.integers(-2, 3, before.size), before)
        old[name] = Bits("BF16", shape, before)
        new[name] = Bits("BF16", shape, after.astype(np.uint16))
    expected = list(chunks.encode_model(old, new))
    monkeypatch.setenv(SCAN_VARIABLE, "cuda")
    assert list(chunks.encode_model(old, new, threads=4)) == expected
    held = {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in old.items()}
    for chunk in expected:
        chunks.decode_chunk(chunk, held, "it", threads=4)
    assert all(np.array_equal(held[name].data, new[name].data) for name in new)
