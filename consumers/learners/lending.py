"""What other threads still read of a learner's tensors while it goes on: it is read before they change.

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

from consumers.learners.memory_rooms import Rooms, TensorShapes, blanks, size_in
from infra.weights import spent
from infra.weights.inspection import Inspected, convert, inspected

_KEPT = 3  # rooms: of the version before, of the one that is published, and of the next


class Reading(Protocol):
    """Somebody reads."""

    def settle(self) -> None:
        """Return when what is read may change."""


class Lent:
    """All that is being read of a learner."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """From now on it is read."""
        self._readings.append(reading)

    def settle(self) -> None:
        """Return when all that was lent may change."""
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
        """The hash over all."""
        return self.found.root


def made_of(tensors: dict[str, torch.Tensor]) -> MadeWeights:
    """Of tensors on a CPU that nobody changes any more."""
    future: Future[dict[str, torch.Tensor]] = Future()
    future.set_result(tensors)
    return MadeWeights(inspected(tensors), lambda: future)


class _Copying:
    def __init__(self, future: Future[dict[str, torch.Tensor]]) -> None:
        self._future = future

    def settle(self) -> None:
        wait([self._future])  # an error is raised where the copy is used


class Copies:
    """Makes copies of weights, in one type, into memory that is used again."""

    def __init__(self, dtype: torch.dtype, lent: Lent) -> None:
        self.dtype, self._lent, self._rooms = dtype, lent, Rooms(_KEPT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy")

    def live(self, tensors: Mapping[str, torch.Tensor]) -> MadeWeights:
        """Of tensors on a CPU that are hashed where they are, and copied beside training."""
        plain = {name: tensor.detach() for name, tensor in tensors.items()}

        def copied() -> Future[dict[str, torch.Tensor]]:
            future = self._thread.submit(self._copied, plain)
            self._lent.add(_Copying(future))
            return future

        return MadeWeights(inspected(plain, self.dtype), copied)

    def at_once(
        self, write: Callable[[Mapping[str, torch.Tensor]], None], shapes: TensorShapes
    ) -> MadeWeights:
        """Of tensors that `write` brings here, each into the one of its name."""
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
        """End the thread."""
        self._thread.shutdown()
