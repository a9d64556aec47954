"""Memory that is used again, and how much of it there is.

What a system hands out anew is cleared page by page, which takes longer than to copy into it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from infra import choices
from infra.weights.arrays import Array

TensorShapes = Mapping[str, Sequence[int]]

MEMORY, DISK, NONE = choices.ROOM.ways
_SPARE = 256 << 20  # bytes that are left to others
_ALIGNED = 64
_GROUP = Path("/sys/fs/cgroup")


class Rooms:
    """Arrays of bytes. One that nobody holds any more is handed out again."""

    def __init__(self, most: int) -> None:
        self._most = most  # that are kept for later
        self._free: list[mmap.mmap] = []

    def take(self, size: int) -> Array:
        """So many bytes, with anything in them."""
        free = next((room for room in self._free if len(room) == max(size, 1)), None)
        if free is not None:
            self._free.remove(free)
        room = free if free is not None else mmap.mmap(-1, max(size, 1))
        # All views of the array hold it, and nobody else has this view of the memory.
        found = np.frombuffer(memoryview(room), np.uint8)
        weakref.finalize(found, self._back, room).atexit = False
        return found

    def _back(self, room: mmap.mmap) -> None:
        if len(self._free) < self._most:
            self._free.append(room)


def blanks(room: Array, shapes: TensorShapes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of such shapes and one type in a room that is as large as `size_in` says."""
    found, at, whole = {}, 0, torch.from_numpy(room)
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        found[name] = whole[at : at + size].view(dtype).view(*shape)
        at += _padded(size)
    return found


def size_in(shapes: TensorShapes, dtype: torch.dtype) -> int:
    """Bytes of a room for them."""
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape in shapes.values())


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def where(size: int) -> str:
    """Where so many bytes have room for a while: in memory, on disk, or nowhere."""
    said = choices.ROOM.forced()
    if said:
        return said
    if memory_left() > size + _SPARE:
        return MEMORY
    with contextlib.suppress(OSError):
        if shutil.disk_usage(tempfile.gettempdir()).free > size + _SPARE:
            return DISK
    return NONE


def memory_left() -> int:
    """Bytes that this process may still take, as the kernel says, and as its container says."""
    left = 1 << 62
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        left = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: then there is no limit
        limit = int((_GROUP / "memory.max").read_text())
        left = min(left, limit - int((_GROUP / "memory.current").read_text()))
    return left
