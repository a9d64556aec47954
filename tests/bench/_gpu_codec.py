"""Deltas made and applied, compiled on the CPU and scanned on a GPU if there is one: GB of weights a second.

A process of its own: `python -m tests.bench._gpu_codec MIB`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from infra import choices
from infra.weights.bits import Bits
from infra.weights.codec.chunks import decode_chunk, encode_model
from infra.weights.codec.scan import SCAN_VARIABLE

_TENSORS = 16
_STEP = 2e-6  # of the weights: changes about 3 % of those in bf16
_THREADS = (1, 8)


def _bf16(values: np.ndarray) -> np.ndarray:
    raw = values.astype(np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def measure(mib: int) -> dict[str, Any]:
    """Figures by way and threads."""
    draw, old, new = np.random.default_rng(0), {}, {}
    each = (mib << 20) // 2 // _TENSORS
    for number in range(_TENSORS):
        weights = draw.standard_normal(each, np.float32) * 0.02
        step = np.clip(draw.standard_normal(each, np.float32), -1, 1) * np.float32(_STEP)
        old[f"t{number}"] = Bits("BF16", (each,), _bf16(weights))
        new[f"t{number}"] = Bits("BF16", (each,), _bf16(weights + step))
    size = sum(one.data.nbytes for one in old.values()) / 1e9
    found: dict[str, Any] = {
        "changed": float(np.mean([(old[name].data != new[name].data).mean() for name in old]))
    }
    ways = ["compiled", *(["cuda"] if choices.cuda() else [])]
    chunks: dict[str, list[bytes]] = {}
    for way in ways:
        os.environ[SCAN_VARIABLE] = way
        few = list(old)[:1]
        list(encode_model({n: old[n] for n in few}, {n: new[n] for n in few}))  # compiles
        for threads in _THREADS:
            began = time.perf_counter()
            chunks[way] = list(encode_model(old, new, threads=threads))
            encoded_s = time.perf_counter() - began
            held = {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in old.items()}
            began = time.perf_counter()
            for chunk in chunks[way]:
                decode_chunk(chunk, held, "bench", threads=threads)
            applied_s = time.perf_counter() - began
            if not all(np.array_equal(held[name].data, new[name].data) for name in new):
                raise AssertionError(f"{way}: other weights")
            found[f"{way}_{threads}"] = {"encode_gb_s": size / encoded_s, "apply_gb_s": size / applied_s}
    if len({tuple(one) for one in chunks.values()}) > 1:
        raise AssertionError("the ways make other chunks")
    return found


if __name__ == "__main__":
    print("RESULT", json.dumps(measure(int(sys.argv[1]))))
