"""A slice of a tensor: some spans of one axis, as a rank of an engine holds them in one piece.

[experts, gate then up, width], axis 1, 2 ranks     rank 0 holds ▓     ▓▓░░ ▓▓░░
                                                                       gate  up
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from infra.weights.arrays import Array
from infra.weights.patch import TensorPatch


@dataclass(frozen=True)
class Slice:
    """Some spans of an axis, which ascend and don't overlap."""

    axis: int
    spans: tuple[tuple[int, int], ...]  # where each begins, and where it ends

    @property
    def size(self) -> int:
        """How long the axis is in the slice."""
        return sum(end - begin for begin, end in self.spans)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice of a tensor."""
        shape = list(whole)
        shape[self.axis] = self.size
        return tuple(shape)

    def values(self, flat: Array, shape: Sequence[int]) -> Array:
        """Return the slice of a flat tensor, flat; one span of the first axis is not copied."""
        before, width = math.prod(shape[: self.axis]), math.prod(shape[self.axis + 1 :])
        if before == 1 and len(self.spans) == 1:
            ((begin, end),) = self.spans
            rows: Array = flat[begin * width : end * width]
            return rows
        blocks = flat.reshape(before, shape[self.axis], width)
        parts = [blocks[:, begin:end] for begin, end in self.spans]
        return np.ascontiguousarray(np.concatenate(parts, axis=1)).reshape(-1)

    def patch(self, part: TensorPatch) -> TensorPatch:
        """Return what a patch of the whole tensor means for the slice."""
        shape, positions = self.shape(part.shape), part.positions
        if positions is None:
            return TensorPatch(part.dtype, shape, None, self.values(part.values, part.shape))
        before, width = math.prod(part.shape[: self.axis]), math.prod(part.shape[self.axis + 1 :])
        if before == 1:  # positions ascend, and those of a span are neighbours
            mine, values = self._of_first_axis(positions, part.values, width)
            return TensorPatch(part.dtype, shape, mine, values)
        kind = positions.dtype.type
        blocks, inside = np.divmod(positions, kind(part.shape[self.axis] * width))
        found, moved = np.zeros(positions.size, dtype=bool), np.zeros_like(positions)
        for begin, end, to in self._placed():
            picked = (inside >= begin * width) & (inside < end * width)
            found |= picked
            moved[picked] = inside[picked] - kind(begin * width) + kind(to * width)
        mine = blocks[found] * kind(self.size * width) + moved[found]
        return TensorPatch(part.dtype, shape, mine, part.values[found])

    def _of_first_axis(self, positions: Array, values: Array, width: int) -> tuple[Array, Array]:
        """Return the positions in the slice, and the values there."""
        kind, mine, theirs = positions.dtype.type, list[Array](), list[Array]()
        for begin, end, to in self._placed():
            first, last = bisect_left(positions, begin * width), bisect_left(positions, end * width)
            if last > first:
                mine.append(positions[first:last] - kind(begin * width) + kind(to * width))
                theirs.append(values[first:last])
        if not mine:
            return positions[:0], values[:0]
        return (mine[0], theirs[0]) if len(mine) == 1 else (np.concatenate(mine), np.concatenate(theirs))

    def _placed(self) -> Iterator[tuple[int, int, int]]:
        """Yield where each span begins and ends, and where it begins in the slice."""
        sizes = [end - begin for begin, end in self.spans]
        for (begin, end), to in zip(self.spans, itertools.accumulate(sizes, initial=0), strict=False):
            yield begin, end, to
