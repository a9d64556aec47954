"""Deltas made, compiled on the CPU and on a GPU where the weights lie, and applied: GB of weights a second.

A process of its own: `python -m tests.bench._gpu_codec MIB`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from infra import choices
from infra.weights.bits import Bits
from infra.weights.codec.chunks import decode_chunk, encode_model
from infra.weights.gpu_bits import GpuBits

_TENSORS = 16
_STEPS = {"3%": 1.1e-6, "17%": 9.8e-6}  # of the weights, by how many of those in bf16 change
_THREADS = (1, 4, 8)  # 4: what a machine with 16 cores takes by default
_WARM = 1 << 24  # elements of each model that is coded before times are taken: kernels are compiled for it
_TIMES = 2  # the fastest counts: the first also takes memory that is then kept

_Tensors = dict[str, Bits]


def _bf16(values: np.ndarray) -> np.ndarray:
    raw = values.astype(np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def _made(mib: int, moved: float) -> tuple[_Tensors, _Tensors]:
    draw, old, new = np.random.default_rng(0), _Tensors(), _Tensors()
    each = (mib << 20) // 2 // _TENSORS
    for number in range(_TENSORS):
        weights = draw.standard_normal(each, np.float32) * np.float32(0.02)
        step = np.clip(draw.standard_normal(each, np.float32), -1, 1) * np.float32(moved)
        old[f"t{number}"] = Bits("BF16", (each,), _bf16(weights))
        new[f"t{number}"] = Bits("BF16", (each,), _bf16(weights + step))
    return old, new


def _here(model: Mapping[str, Bits]) -> _Tensors:
    return {name: Bits(one.dtype, one.shape, one.data.copy()) for name, one in model.items()}


def _there(model: Mapping[str, Bits]) -> _Tensors:
    return {
        name: GpuBits(one.dtype, one.shape, torch.from_numpy(one.data.view(np.int16)).cuda())
        for name, one in model.items()
    }


def _first(model: Mapping[str, Bits]) -> _Tensors:
    name, one = next(iter(model.items()))
    count = min(_WARM, one.data.size)
    return {name: Bits(one.dtype, (count,), one.data[:count])}


def _fastest(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def _way(laid: Callable[[Mapping[str, Bits]], _Tensors], old: _Tensors, new: _Tensors) -> Any:
    """Return the chunks that a way makes, and its figures by threads."""
    size, few = sum(one.data.nbytes for one in old.values()) / 1e9, (laid(_first(old)), laid(_first(new)))
    for threads in _THREADS:  # compiles
        list(encode_model(*few, threads=threads))
    before, after, made, found = laid(old), laid(new), dict[int, list[bytes]](), {}
    for threads in _THREADS:

        def encode(threads: int = threads) -> None:
            made[threads] = list(encode_model(before, after, threads=threads))

        found[threads] = {"encode_gb_s": size / _fastest(encode)}
    chunks = made[_THREADS[0]]
    if any(other != chunks for other in made.values()):
        raise AssertionError("more threads make other chunks")
    return chunks, found


def _applied(chunks: list[bytes], old: _Tensors, new: _Tensors) -> dict[int, float]:
    """Return the speed by threads. Raise unless chunks lead from the old weights to the new ones.

    All is in main memory: there is no other way, since all that read chunks have their weights there.
    """
    size, found = sum(one.data.nbytes for one in old.values()) / 1e9, {}
    for threads in _THREADS:
        held = [_here(old) for _ in range(_TIMES)]
        fresh = iter(held)

        def decode(threads: int = threads, fresh: Iterator[_Tensors] = fresh) -> None:
            model = next(fresh)
            for chunk in chunks:
                decode_chunk(chunk, model, "bench", threads=threads)

        found[threads] = size / _fastest(decode)
        if not all(np.array_equal(one[name].data, new[name].data) for one in held for name in new):
            raise AssertionError("other weights")
    return found


def _of_change(mib: int, moved: float) -> dict[str, Any]:
    """Figures by way and threads; and of each, how many times as fast as compiled on one thread."""
    old, new = _made(mib, moved)
    found: dict[str, Any] = {
        "changed": float(np.mean([(old[name].data != new[name].data).mean() for name in old]))
    }
    chunks, figures = _way(_here, old, new)
    decoded = _applied(chunks, old, new)
    for threads, one in figures.items():
        found[f"compiled_{threads}"] = one | {"decode_gb_s": decoded[threads]}
    if not choices.cuda():
        return found
    made, there = _way(_there, old, new)
    if made != chunks:
        raise AssertionError("the ways make other chunks")
    for threads, one in there.items():
        found[f"cuda_{threads}"] = one | {
            "encode_over_compiled": one["encode_gb_s"] / figures[1]["encode_gb_s"]
        }
    return found


def measure(mib: int) -> dict[str, Any]:
    """Figures by how many of the weights change."""
    return {name: _of_change(mib, moved) for name, moved in _STEPS.items()}


if __name__ == "__main__":
    print("RESULT", json.dumps(measure(int(sys.argv[1]))))
