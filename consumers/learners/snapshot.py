"""A learner's state at one moment, which another thread reads piece by piece while training goes on.

Taking a snapshot copies nothing. Before the learner changes its tensors it settles the snapshot: tensors
that were not read by then are copied into memory, or into an unnamed file if memory does not suffice. If
neither has room, the learner waits until all is read.

taken ──► read, read, read ……………………… read to its end: nothing was held twice
                       └─ settled: the rest is copied by several threads ──► read, read, …
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from consumers.learners import memory_rooms as rooms
from infra.waiting import Wait
from infra.weights.arrays import Array
from infra.weights.bits import bits_of, file_head
from infra.weights.gpu_transfer import downloaded, own_stream, settled
from infra.weights.inspection import threads

PIECE = 8 << 20  # bytes that are read at once
_LOOK_S = 0.1

Outlines = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PartPlace:
    """The place in a store where each rank writes its part of a state."""

    store: str  # URL
    run: str
    iteration: int
    trainer_epoch: int
    store_id: str = ""  # empty: not known


class Abandoned(RuntimeError):
    """Raised to the reader of a snapshot that was abandoned."""


class StateSnapshot:
    """Tensors by name, to be read once. The learner will change the `live` ones, and nobody the `own` ones.

    If nobody reads the snapshot after all, `abandon` has to be called. `shapes`: of the whole tensors, if
    this is one rank's part of a state, in pieces (see `state_pieces.py`). `ranks`: that have a part of it.
    """

    def __init__(
        self, live: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor] | None = None,
        *, deadline_s: float = math.inf, shapes: Shapes | None = None, ranks: int = 1,
    ) -> None:  # fmt: skip
        self.shapes, self.ranks = shapes, ranks
        tensors = {name: tensor.detach() for name, tensor in {**live, **(own or {})}.items()}
        self.outlines: Outlines = {name: _outline(tensor) for name, tensor in tensors.items()}
        self.head, self._order = file_head(self.outlines)
        self._flat = {name: _flat(tensor) for name, tensor in tensors.items()}
        for device in {flat.device for flat in self._flat.values()}:
            settled(device)  # other streams will read them
        self._sizes = {name: flat.numel() for name, flat in self._flat.items()}
        self._live, self._deadline_s = set(live), deadline_s
        self._next, self._done = 0, False  # `_next`: place in the order of the tensor that is read now
        self._changed = threading.Condition()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(self._sizes.values())

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        """Yield names and bytes of tensors in a safetensors file's order. Each piece overwrites the last."""
        room = torch.empty(PIECE, dtype=torch.uint8)
        try:
            for place, name in enumerate(self._order):
                yield from ((name, piece) for piece in self._read(place, name, room))
        finally:
            self.abandon()

    def _read(self, place: int, name: str, room: torch.Tensor) -> Iterator[memoryview]:
        for at in range(0, self._sizes[name], PIECE):
            with self._changed:
                if self._done:
                    raise Abandoned(f"the snapshot was given up before all of it was read: {name} is next")
                self._next = place
                part = self._flat[name][at : at + PIECE]
                part = _copied(part, room[: part.numel()])
                self._changed.notify_all()
            yield part.numpy().data
        with self._changed:
            self._flat.pop(name, None)
            self._next = place + 1
            self._changed.notify_all()

    def abandon(self) -> None:
        """End the reading, and let go of all tensors."""
        with self._changed:
            self._done = True
            self._flat.clear()
            self._changed.notify_all()

    def settle(self) -> None:
        """Return when the live tensors may change: all was read, or the rest is copied."""
        with self._changed:
            rest = [name for name in self._order[self._next :] if name in self._live and name in self._flat]
            if self._done or not rest:
                return
            size = sum(self._sizes[name] for name in rest)
            if (room := _room(size, self.ranks)) is not None:
                self._flat |= _moved({name: self._flat[name] for name in rest}, room)
                self._live.clear()
                return
            self._wait()

    def _wait(self) -> None:
        wait = Wait(
            "a checkpoint to be written (neither memory nor TMPDIR has room for a copy of it)",
            unblocked_by="the store", deadline_s=self._deadline_s,
        )  # fmt: skip
        while not self._done:
            if self._changed.wait(_LOOK_S):
                wait.progress()
            wait.check()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _outline(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return bits_of(torch.empty(0, dtype=tensor.dtype)).dtype, tuple(tensor.shape)


def _copied(part: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    if part.device.type != "cpu":
        with own_stream(part.device):  # else each piece would wait for all that training has queued
            (found,) = downloaded(part)
        return torch.from_numpy(found)
    np.copyto(room.numpy(), part.numpy())
    return room


def _move(part: torch.Tensor, room: torch.Tensor) -> None:
    if (found := _copied(part, room)) is not room:
        room.copy_(found)


def _room(size: int, ranks: int = 1) -> Array | None:
    """Return so many bytes of memory, or of a mapped file; None if there is room in neither.

    `ranks`: that take as many at the same time, perhaps all on this machine.
    """
    place = rooms.where(size * ranks)
    try:
        if place == rooms.MEMORY:
            return rooms.Rooms(0).take(size)
    except OSError:
        place = rooms.DISK
    try:
        if place == rooms.DISK:
            return _in_a_file(size)
    except OSError:
        pass
    return None


def _in_a_file(size: int) -> Array:
    with tempfile.TemporaryFile(prefix="streamrl-state-") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a page without a block behind it would kill the process
        found: Array = np.asarray(np.memmap(file, np.uint8, "r+", shape=(size,)))
        return found


def _moved(tensors: Mapping[str, torch.Tensor], room: Array) -> dict[str, torch.Tensor]:
    """Copy flat tensors into a room, end to end, with several threads."""
    found, at, jobs = {}, 0, []
    for name, tensor in tensors.items():
        found[name] = torch.from_numpy(room[at : at + tensor.numel()])
        at += tensor.numel()
        jobs += list(zip(tensor.split(PIECE), found[name].split(PIECE), strict=True))
    with ThreadPoolExecutor(threads(), thread_name_prefix="settle") as pool:
        list(pool.map(lambda job: _move(*job), jobs))
    return found
