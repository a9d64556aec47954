"""Hashes of tensors of a GPU: copied piece by piece through pinned memory, on a stream of their own.

copy of piece n + 1 ──► pinned buffer 1 ─┐
hash of piece n     ◄── pinned buffer 0 ◄┘

So a decode step beside them waits for one small piece at most, and not for the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch

from infra.weights.bits import safetensors_type
from infra.weights.digest import TensorHash

PIECE_BYTES = 64 << 20  # 1.2 ms of copying; a thread beside an engine waits long for its turn after each
_BUFFERS = 2


class StagedHashes:
    """Two buffers and a stream. `pin`: False for tests without a GPU."""

    def __init__(self, *, pin: bool = True, piece: int = PIECE_BYTES) -> None:
        self._pin, self._size = pin, piece
        self._buffers: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the hash of each tensor.

        All that wrote them must be done: the stream here waits for no other.
        """
        hashes = {name: _hash_of(tensor) for name, tensor in tensors.items()}
        under_way: list[tuple[str, torch.Tensor, torch.cuda.Event | None]] = []
        for number, (name, piece) in enumerate(self._pieces(tensors)):
            if len(under_way) == _BUFFERS:
                self._add(hashes, *under_way.pop(0))
            under_way.append((name, *self._fetch(piece, number % _BUFFERS)))
        for one in under_way:
            self._add(hashes, *one)
        return {name: one.hexdigest() for name, one in hashes.items()}

    def _pieces(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            for piece in tensor.detach().reshape(-1).view(torch.uint8).split(self._size):
                yield name, piece

    def _fetch(self, piece: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy a piece into a buffer. Return the copy, and what says when it is there."""
        if not self._buffers:
            self._buffers = [
                torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pin) for _ in range(_BUFFERS)
            ]
            self._stream = torch.cuda.Stream(piece.device) if self._pin else None
        copy = self._buffers[number][: piece.numel()]
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            copy.copy_(piece, non_blocking=True)
            if self._stream is None:
                return copy, None
            event = torch.cuda.Event(blocking=True)  # whoever waits leaves the core to the engine
            event.record()
        return copy, event

    def _add(
        self, hashes: Mapping[str, TensorHash], name: str, copy: torch.Tensor, event: torch.cuda.Event | None
    ) -> None:
        if event is not None:
            event.synchronize()
        hashes[name].update(copy.numpy().data)


def _hash_of(tensor: torch.Tensor) -> TensorHash:
    return TensorHash(safetensors_type(tensor), tuple(tensor.shape), all_cores=True)
