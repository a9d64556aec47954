"""Lend a learner's tensors to other threads while training goes on: they are read before they change.

On a GPU, copies are made at once, and stay there if there is room: they are hashed and coded there.

step ──► hash ──► copy ─────────────┐ (a thread) ──► published
            └───► snapshot ─────────┤ (a thread) ──► checkpoint
         next micro-batches …       │
next step waits for what was not ◄──┘ read yet, or copies it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import torch

from consumers.learners.gpu_room import GpuRoom
from consumers.learners.memory_rooms import Rooms, TensorShapes, blanks, size_in
from infra.weights import spent
from infra.weights.inspection import Inspected, convert, inspected

_KEPT = 3  # copies in memory: of the version before, the one that is being published, and the next


class Reading(Protocol):
    """One reader of lent tensors."""

    def settle(self) -> None:
        """Return when the tensors that it reads may change."""


class Lent:
    """All readings of a learner's tensors that are under way."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """Add a reading that has begun."""
        self._readings.append(reading)

    def settle(self) -> None:
        """Return when all tensors that were lent may change."""
        while self._readings:
            self._readings[0].settle()
            self._readings.pop(0)


@dataclass(frozen=True)
class MadeWeights:
    """The weights that a step has made: their hashes, and on demand a copy of them to be published."""

    found: Inspected
    copy: Callable[[], Future[dict[str, torch.Tensor]]]

    @property
    def root(self) -> str:
        """The hash over all tensors."""
        return self.found.root


def made_of(tensors: dict[str, torch.Tensor]) -> MadeWeights:
    """Hash tensors that nobody changes any more, and that serve as their own copy."""
    future: Future[dict[str, torch.Tensor]] = Future()
    future.set_result(tensors)
    return MadeWeights(inspected(tensors), lambda: future)


class _Copying:
    def __init__(self, future: Future[dict[str, torch.Tensor]]) -> None:
        self._future = future

    def settle(self) -> None:
        wait([self._future])  # an error is raised where the copy is used


class Copies:
    """Makes copies of weights in one dtype, in memory that is used again; on a GPU if it has room."""

    def __init__(self, dtype: torch.dtype, lent: Lent, device: torch.device, *, turns: bool = False) -> None:
        """`device`: where the weights lie; `turns`: whether engines take what is free there in their turn."""
        self.dtype, self._lent, on_gpu = dtype, lent, device.type == "cuda"
        self._rooms = Rooms(_KEPT, locked=on_gpu)
        # One more may be made while others wait.
        self._gpu = GpuRoom(device, _KEPT + 1) if on_gpu and not turns else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy")

    def stepped(self) -> None:
        """Note that the learner has taken a step."""
        if self._gpu is not None:
            self._gpu.stepped()

    def live(self, tensors: Mapping[str, torch.Tensor]) -> MadeWeights:
        """Hash tensors on a CPU where they are; they are copied in another thread while training goes on."""
        plain = {name: tensor.detach() for name, tensor in tensors.items()}

        def copied() -> Future[dict[str, torch.Tensor]]:
            future = self._thread.submit(self._copied, plain)
            self._lent.add(_Copying(future))
            return future

        return MadeWeights(inspected(plain, self.dtype), copied)

    def at_once(
        self, write: Callable[[Mapping[str, torch.Tensor]], None], shapes: TensorShapes
    ) -> MadeWeights:
        """Have `write` fill a copy of each tensor now, by name, and hash the copies."""
        if self._gpu is not None and self._gpu.fits(size_in(shapes, self.dtype)):
            copy = {
                name: torch.empty(tuple(shape), dtype=self.dtype, device=self._gpu.device)
                for name, shape in shapes.items()
            }
        else:
            copy = self._blanks(shapes)
        write(copy)
        return made_of(copy)

    @spent.counted()
    def _copied(self, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copy = self._blanks({name: tensor.shape for name, tensor in plain.items()})
        for name, tensor in plain.items():
            convert(tensor.contiguous().view(-1), copy[name].view(-1))
        return copy

    def _blanks(self, shapes: TensorShapes) -> dict[str, torch.Tensor]:
        return blanks(self._rooms.take(size_in(shapes, self.dtype)), shapes, self.dtype)

    def close(self) -> None:
        """End the copying thread."""
        self._thread.shutdown()
