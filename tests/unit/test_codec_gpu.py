"""The codec's GPU kernels, in Triton's interpreter: what they make is what numpy makes, number for number."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infra.weights.arrays import Array
from infra.weights.bits import Bits, kind_of
from infra.weights.codec.scan import SCAN_VARIABLE, scanner
from infra.weights.weights_error import WeightsError

ROOT = Path(__file__).parents[2]


def drawn(dtype: str, changed: float, count: int) -> tuple[Array, Array]:
    rng, kind = np.random.default_rng(count), kind_of(dtype)
    old, other = (rng.integers(0, 1 << kind.bits, count, dtype=np.uint64).astype(kind.unsigned) for _ in "ab")
    return old, np.where(rng.random(count) < changed, other, old)


def compare() -> None:
    """All types, in a process in which Triton interprets."""
    from infra.weights.codec import scan_gpu, scan_plain

    scan_gpu._BLOCK = 64
    for dtype, changed, count in itertools.product(
        ["BF16", "F16", "F32", "U8"], [0.0, 0.05, 1.0], [1, 64, 300]
    ):
        kind = kind_of(dtype)
        old, new = drawn(dtype, changed, count)
        edges = np.unique(np.arange(5) * kind.exponents // 5).astype(np.uint8)
        expected = scan_plain.scan(old, new, kind, edges, count)
        found = scan_gpu.scan(old, new, kind, edges, count)
        assert expected is not None
        for name in ("begins", "ends", "gaps", "steps"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype, name
        data = old.copy()
        assert scan_gpu.apply(data, kind, edges, expected)
        assert np.array_equal(data, new)
        if not expected.gaps.size:
            continue
        assert scan_gpu.scan(old, new, kind, edges, expected.gaps.size - 1) is None
        for more in (1, count):  # to a neighbour, or to where there is none
            data = old.copy()
            expected.gaps[-1] += more
            assert not scan_gpu.apply(data, kind, edges, expected)
            assert np.array_equal(data, old)


def whole_way() -> None:
    """From models to chunks and back, where STREAMRL_SCAN says what scans."""
    from infra.weights.codec import chunks, encoding, groups, tiles

    for module in (tiles, groups, chunks, encoding):
        module.TILE = 256  # type: ignore[attr-defined]
    old, new = {}, {}
    for number, (dtype, changed, count) in enumerate(
        [("BF16", 0.02, 900), ("BF16", 0.5, 300), ("F32", 0.05, 300), ("U8", 0.05, 70)]
    ):
        for model, data in zip((old, new), drawn(dtype, changed, count), strict=True):
            model[f"t{number}"] = Bits(dtype, (count,), data)
    found = {}
    for which in ("plain", "cuda"):
        os.environ[SCAN_VARIABLE] = which
        held = {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in old.items()}
        found[which] = list(chunks.encode_model(old, new))
        for chunk in found[which]:
            chunks.decode_chunk(chunk, held, "it")
        assert all(np.array_equal(held[name].data, new[name].data) for name in new), which
    assert found["plain"] == found["cuda"]


@pytest.mark.parametrize("what", [compare, whole_way])
def test_kernels_make_what_numpy_makes(what: object) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    name = what.__name__  # type: ignore[attr-defined]
    code = f"from tests.unit.test_codec_gpu import {name}; {name}()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_there_is_an_error_that_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    old, new = drawn("BF16", 0.5, 10)
    with pytest.raises(WeightsError, match="on a GPU, but torch sees none: unset STREAMRL_SCAN"):
        scanner("cuda").scan(old, new, kind_of("BF16"), np.zeros(1, np.uint8), 10)
