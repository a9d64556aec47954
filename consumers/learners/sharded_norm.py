"""The norm of a vector that lies in pieces on several ranks: the same bits however it is cut.

Sums of floats depend on their order, unless no addition rounds. So each square is split into two numbers,
each of few enough bits that the sum of all of them is exact: one that is a multiple of a large unit, and of
the rest one that is a multiple of a small unit. The rest of that is below 2^-80 of the sum or so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from consumers.learners import collective

_STRETCH = 1 << 22  # elements whose squares are in memory at a time
_BITS = 52  # of a float's fraction


def norm_of_pieces(pieces: Callable[[], Iterable[torch.Tensor]], count: int, device: torch.device) -> float:
    """Return the root of the sum of squares over all ranks; infinity if an element is no finite
    number.

    `pieces`: returns this rank's part in flat fp32 tensors; it is called twice. `count`: elements of all
    ranks.
    """
    most = torch.zeros((), dtype=torch.float64, device=device)
    for piece in pieces():
        if piece.numel():
            most = torch.maximum(most, piece.abs().max().double())
    collective.maximum(most.nan_to_num_(nan=math.inf, posinf=math.inf))
    largest = float(most)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    upper = _power(count * largest**2)
    lower = _power(count * upper * 2.0**-_BITS)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for piece in pieces():
        for some in piece.split(_STRETCH):
            squares = some.double().square_()  # 24 bits squared: exact
            large = (squares + upper) - upper
            squares -= large
            sums[0] += large.sum()
            sums[1] += ((squares + 1.5 * lower) - 1.5 * lower).sum()
    collective.add_up(sums)
    return math.sqrt(float(sums[0]) + float(sums[1]))


def _power(bound: float) -> float:
    """Return a power of two that is not smaller."""
    return 2.0 ** math.ceil(math.log2(bound))
