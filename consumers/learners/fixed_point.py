"""Sum gradients in int64, in units of 2^-32: the sum has the same bits in whichever order they come."""

from __future__ import annotations

import numpy as np
import torch

from consumers.learners import collective
from infra import choices

_SCALE = 2.0**32
_STRETCH = 1 << 22  # elements that are converted at a time
_LARGEST = 2.0**62 / _SCALE  # limit of the sum over all micro-batches and ranks


class FixedPointSum:
    """The sum of gradients that have `size` elements each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._sum = torch.zeros(size, dtype=torch.int64, device=device)
        self._most = 0.0  # bound on the magnitude of all elements of the sum

    def add(self, gradient: torch.Tensor) -> torch.Tensor | float:
        """Add a gradient and set it to zero. Return its largest magnitude, for `fits`.

        On a GPU that is a tensor, and a caller that does not look at it does not wait.
        """
        most: torch.Tensor | float
        if gradient.device.type == "cpu" and choices.compiles():
            from consumers.learners.fixed_point_cpu import add_and_clear

            most = float(add_and_clear(gradient.numpy(), self._sum.numpy(), np.float32(_SCALE), _LARGEST))
        elif gradient.device.type == "cuda":
            from consumers.learners import fixed_point_gpu

            most = fixed_point_gpu.add_and_clear_there(gradient, self._sum, _SCALE)
        else:
            most = float(gradient.abs().max())
            self._sum += (gradient * _SCALE).round_().to(torch.int64)
            gradient.zero_()
        return most

    def fits(self, most: float) -> bool:
        """Return False if a gradient of this largest magnitude is not finite, or the sum could overflow."""
        self._most += most
        return self._most * collective.ranks() < _LARGEST

    def mean_into(self, gradient: torch.Tensor, total: float) -> None:
        """Write the sum over all ranks, divided by `total`, into `gradient`; reset the sum to zero."""
        collective.add_up(self._sum)
        self.part_into(gradient, 0, total)
        self.clear()

    def part_into(self, gradient: torch.Tensor, begin: int, total: float) -> None:
        """Write this rank's sum, divided by `total`, into `gradient`: elements from `begin` on, as many."""
        mine = self._sum[begin : begin + gradient.numel()]
        for some, part in zip(gradient.split(_STRETCH), mine.split(_STRETCH), strict=True):
            some.copy_(part.double().div_(_SCALE * total))  # fp64 of all would be two gradients large

    def clear(self) -> None:
        """Reset the sum to zero."""
        self._sum.zero_()
        self._most = 0.0
