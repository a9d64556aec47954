"""New weights on their way to a GPU lie in pinned memory: a GPU takes 7 times as many bytes a second.

The memory is pinned once, in blocks, and used again for the next version. Pinning is slow, so it happens in
the thread beside the engine's steps, as do the copies into the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

BLOCK_BYTES = 64 << 20  # a power of two, since torch pins powers of two
_ALIGNED = 64
_PART = 2  # one in so many of a GPU's free bytes may be taken: KV cache and weights have all others
_PART_OF_WHOLE = 8  # likewise for whole tensors, which need not go there before the pause


class PinnedUploads:
    """Blocks of pinned memory for one version."""

    def __init__(self, *, pin: bool = True, block: int = BLOCK_BYTES, ahead: int = 0) -> None:
        """`pin`: False for tests without a GPU; `ahead`: bytes of whole tensors that may go there early."""
        self._pin, self._size, self._ahead = pin, block, ahead
        self._blocks: list[torch.Tensor] = []
        self._block = self._at = 0  # where the next piece begins
        self._room: int | None = None  # bytes that are left for this version on the GPU; None: not known
        self._room_of_whole = 0  # of them, for whole tensors
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Begin a version: the one before is not used any more."""
        self.finish()
        self._block, self._at, self._room = 0, 0, None

    def fit(self, size: int, device: torch.device, *, whole: bool = False) -> bool:
        """Return whether so many bytes more of this version have room on a GPU. If so, they are taken.

        `whole`: whether they are of a whole tensor.
        """
        if self._room is None:
            cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + cached
            self._room, self._room_of_whole = free // _PART, min(self._ahead, free // _PART_OF_WHOLE)
        fits = size <= (min(self._room, self._room_of_whole) if whole else self._room)
        taken = size if fits else 0
        self._room -= taken
        self._room_of_whole -= taken if whole else 0
        return fits

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """Put some flat values, which fit into a block, into one. Return the copy."""
        if self._size - self._at < values.nbytes:
            self._block, self._at = self._block + 1, 0
        ((_, piece),) = self.pieces(values)
        return piece

    def pieces(self, values: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Put flat values into the blocks. Return each piece: its place in the values, and the copy."""
        width, begin = values.element_size(), 0
        while begin < values.numel():
            if self._at >= self._size:
                self._block, self._at = self._block + 1, 0
            if self._block == len(self._blocks):
                self._blocks.append(torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pin))
            end = min(values.numel(), begin + (self._size - self._at) // width)
            room = self._blocks[self._block][self._at : self._at + (end - begin) * width]
            piece = room.view(values.dtype)
            piece.copy_(values[begin:end])
            yield slice(begin, end), piece
            self._at += -(-(end - begin) * width // _ALIGNED) * _ALIGNED
            begin = end

    def upload(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return flat values on a GPU, where they are after `finish`. No decode step waits for them."""
        with self._beside(device):
            found = torch.empty(values.numel(), dtype=values.dtype, device=device)
            for place, piece in self.pieces(values):
                found[place].copy_(piece, non_blocking=True)
        return found

    def finish(self) -> None:
        """Wait until all uploads are there."""
        if self._stream is not None:
            self._stream.synchronize()

    def _beside(self, device: torch.device) -> torch.cuda.StreamContext | nullcontext[None]:
        """Return the stream of uploads. It is always the same one: its GPU memory is used again."""
        if not self._pin:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)
