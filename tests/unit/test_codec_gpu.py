"""The codec's GPU kernels, in Triton's interpreter: what they make is what numpy makes, number for number."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def compare() -> None:
    """All types, in a process in which Triton interprets."""
    import torch

    from infra.weights.bits import Array, kind_of
    from infra.weights.codec import scan_gpu, scan_plain

    def copied(bits: Array) -> torch.Tensor:
        return torch.from_numpy(bits.copy())

    scan_gpu._BLOCK, rng = 64, np.random.default_rng(0)
    for dtype, changed, count in itertools.product(
        ["BF16", "F16", "F32", "U8"], [0.0, 0.05, 1.0], [1, 64, 300]
    ):
        kind = kind_of(dtype)
        old, other = (
            rng.integers(0, 1 << kind.bits, count, dtype=np.uint64).astype(kind.unsigned) for _ in "ab"
        )
        new = np.where(rng.random(count) < changed, other, old)
        bands = (np.arange(kind.exponents) * 5 // kind.exponents).astype(np.uint8)
        expected = scan_plain.scan(old, new, kind, bands)
        found = scan_gpu.scan(copied(old), copied(new), kind, bands)
        for name in ("counts", "gaps", "steps"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype, name
        assert np.array_equal(
            scan_gpu.census(copied(old), copied(new), kind), scan_plain.census(old, new, kind)
        )
        data = copied(old)
        assert scan_gpu.apply(data, kind, bands, expected)
        assert np.array_equal(data.numpy(), new)
        if expected.gaps.size:
            expected.gaps[-1] += count
            assert not scan_gpu.apply(copied(old), kind, bands, expected)


def test_kernels_make_what_numpy_makes() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    code = "from tests.unit.test_codec_gpu import compare; compare()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
