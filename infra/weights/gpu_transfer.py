"""Moves numbers between main memory and a GPU through pinned memory, each thread on a stream of its own.

The work of one thread then does not wait for that of another, nor for what computes on the GPU meanwhile.
Without a GPU, in the interpreter of Triton, tensors lie in main memory, and all this does nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from infra.weights.arrays import Array

ALIGNED = 16  # bytes: kernels are compiled apart for what begins elsewhere
# Streams that no thread works on. The memory that a stream has used is kept for it: so there are but few.
_free: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Give this thread a stream of its own, on which all is done when the `with` block ends.

    It does not wait for work that was queued before on other streams: `settled` does that.
    """
    if device.type != "cuda":
        yield
        return
    try:
        stream = _free[device].pop()
    except IndexError:
        stream = torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()
    finally:
        _free[device].append(stream)


def settled(device: torch.device) -> None:
    """Return when all that this thread has queued on a GPU is done: other streams may read it then."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def uploaded(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """Return arrays on a GPU, flat, in one transfer. Unsigned numbers become signed, as GPU bits are."""
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    held = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    raw = held.numpy()
    for array, begin in zip(arrays, begins, strict=True):
        raw[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = held.to(device, non_blocking=True)
    return [
        there[begin : begin + array.nbytes].view(_type(array))
        for array, begin in zip(arrays, begins, strict=True)
    ]


def downloaded(*tensors: torch.Tensor) -> list[Array]:
    """Return copies of tensors in main memory, after one wait for this thread's stream."""
    if not any(tensor.device.type == "cuda" for tensor in tensors):
        return [tensor.clone().numpy() for tensor in tensors]
    held = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for one, tensor in zip(held, tensors, strict=True):
        one.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [one.numpy() for one in held]


def _type(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, f"i{array.itemsize}")).dtype
