"""A pool of memory that is used again, and the place for what does not fit.

The system clears new memory page by page, which takes longer than to copy into memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from infra import choices
from infra.machine_memory import free_memory
from infra.weights.arrays import Array

TensorShapes = Mapping[str, Sequence[int]]

MEMORY, DISK, NONE = choices.ROOM.ways
_SPARE = 256 << 20  # bytes that are left to other processes
_ALIGNED = 64


class Rooms:
    """A pool of byte arrays. An array that nobody holds any more is handed out again.

    `locked`: a GPU writes to them. Memory that is locked takes seven times as many bytes a second.
    """

    def __init__(self, most: int, *, locked: bool = False) -> None:
        self._most = most  # free rooms that are kept for later
        self._free: list[mmap.mmap] = []
        self._locks = _Locks() if locked else None
        if self._locks is not None:
            weakref.finalize(self, self._locks.end, self._free).atexit = False

    def take(self, size: int) -> Array:
        """Return an array of `size` bytes with any contents."""
        free = next((room for room in self._free if len(room) == max(size, 1)), None)
        if free is not None:
            self._free.remove(free)
        room = free if free is not None else self._made(max(size, 1))
        # All views hold this array. When the last view is gone, the room is free again.
        found = np.frombuffer(memoryview(room), np.uint8)
        weakref.finalize(found, self._back, room).atexit = False
        return found

    def _made(self, size: int) -> mmap.mmap:
        room = mmap.mmap(-1, size)
        if self._locks is not None:
            self._locks.begin(room)
        return room

    def _back(self, room: mmap.mmap) -> None:
        if len(self._free) < self._most:
            self._free.append(room)
        elif self._locks is not None:
            self._locks.end([room])


class _Locks:
    """The rooms that CUDA has locked."""

    def __init__(self) -> None:
        self._places: set[int] = set()

    def begin(self, room: mmap.mmap) -> None:
        """Lock a room. If that fails, it is only slower."""
        place = _address(room)
        if not int(torch.cuda.cudart().cudaHostRegister(place, len(room), 0)):
            self._places.add(place)
            return
        with contextlib.suppress(RuntimeError):  # else a later kernel would raise the error
            torch.zeros(1, device="cuda")

    def end(self, rooms: Iterable[mmap.mmap]) -> None:
        """Unlock rooms before their memory is given back.

        Otherwise CUDA would take what lies there next for locked memory, and read the pages of before.
        """
        for place in self._places.intersection(map(_address, rooms)):
            self._places.remove(place)
            torch.cuda.cudart().cudaHostUnregister(place)


def _address(room: mmap.mmap) -> int:
    return int(np.frombuffer(room, np.uint8).ctypes.data)


def blanks(room: Array, shapes: TensorShapes, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and one dtype in a room that is as large as `size_in` says."""
    found, at, whole = {}, 0, torch.from_numpy(room)
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        found[name] = whole[at : at + size].view(dtype).view(*shape)
        at += _padded(size)
    return found


def size_in(shapes: TensorShapes, dtype: torch.dtype) -> int:
    """Return the number of bytes that tensors of these shapes need in a room."""
    return sum(_padded(math.prod(shape) * dtype.itemsize) for shape in shapes.values())


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def where(size: int) -> str:
    """Return where so many bytes have room for a while: MEMORY, DISK or NONE."""
    said = choices.ROOM.forced()
    if said:
        return said
    if free_memory() > size + _SPARE:
        return MEMORY
    with contextlib.suppress(OSError):
        if shutil.disk_usage(tempfile.gettempdir()).free > size + _SPARE:
            return DISK
    return NONE
