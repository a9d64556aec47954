"""Decides whether copies of weights have room on the GPU that trains, beside all that training needs.

Such copies are hashed and coded without bringing all of them to main memory: `infra/weights/gpu_bits.py`.
"""

from __future__ import annotations

import torch

from infra import choices

_CONTEXT = 2 << 30  # bytes that a process takes beside its tensors; if more are taken, others are there too
_SPARE = 8  # one part in so many of the GPU is left: steps differ, and the codec needs room as well


class GpuRoom:
    """Room for some copies on a GPU."""

    def __init__(self, device: torch.device, copies: int) -> None:
        self.device, self._copies = device, copies
        self._stepped, self._fits = False, False

    def stepped(self) -> None:
        """Note that a step was taken: what steps need is known now."""
        self._stepped = True

    def fits(self, size: int) -> bool:
        """Return whether copies of `size` bytes fit: before the first step they do not, and the first answer
        after it stays."""
        if self._stepped and self._copies:
            free, whole = torch.cuda.mem_get_info(self.device)
            others = whole - free - torch.cuda.memory_reserved(self.device)
            left = whole - others - torch.cuda.max_memory_reserved(self.device) - whole // _SPARE
            self._fits = others <= _CONTEXT and left >= self._copies * size and not choices.COPIES.forced()
            self._copies = 0
        return self._fits
