"""Fingerprints of large vectors: whether two are equal to the bit, and about how far apart they are.

A vector is the elements of some tensors, end to end. The digest covers all bits; on a GPU it is another
number, as it is computed there, and the bits would differ between devices anyway. Size and sketch are taken
of every eighth block of a large tensor, to save time: they only say by how much two vectors differ.

    vector ──► sums of its elements 0, 16, 32, …; of 1, 17, 33, …; and so on ──► sketch (16 numbers)

The sketch of a difference is the difference of the sketches. Its length is about that of the difference
itself, as errors have no common sign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from xxhash import xxh3_64

WIDTH = 16
_BLOCK = 1 << 12  # elements
_EVERY = 8
_WHOLE = 1 << 16  # a tensor with no more elements is taken whole


@dataclass(frozen=True)
class Fingerprint:
    """A vector's digest, its length, and its sketch."""

    digest: int
    size: float  # root of the sum of squares
    sketch: tuple[float, ...]
    count: int = 0  # of its elements

    def joined(self, other: Fingerprint) -> Fingerprint:
        """Return the fingerprint of both vectors as one."""
        both = xxh3_64(f"{self.digest} {other.digest}".encode()).intdigest()
        sketch = tuple(np.add(self.sketch, other.sketch).tolist())
        return Fingerprint(both, math.hypot(self.size, other.size), sketch, self.count + other.count)


NOTHING = Fingerprint(0, 0.0, (0.0,) * WIDTH)  # of a vector that was not looked at


def fingerprint(tensors: Iterable[torch.Tensor]) -> Fingerprint:
    """Return the fingerprint of these tensors' elements."""
    every = [tensor.detach().reshape(-1) for tensor in tensors]
    looked = [_sampled(plain) for plain in every]
    shares = [plain.numel() / max(1, some.numel()) for plain, some in zip(every, looked, strict=True)]
    # All that comes from a GPU comes at once: to wait for each number would take longer than to compute it.
    norms = _brought([torch.linalg.vector_norm(some) for some in looked])
    sketches = _brought([folded(some) for some in looked])
    squares, sketch = 0.0, np.zeros(WIDTH)
    for share, norm, sums in zip(shares, norms, sketches, strict=True):
        squares += share * float(norm) ** 2
        sketch += math.sqrt(share) * sums
    count = sum(plain.numel() for plain in every)
    return Fingerprint(_digest(every), math.sqrt(squares), tuple(sketch.tolist()), count)


def _brought(numbers: Sequence[torch.Tensor]) -> np.ndarray:
    found: np.ndarray = (torch.stack(list(numbers)) if numbers else torch.empty(0)).cpu().numpy()
    return found


def _digest(every: Sequence[torch.Tensor]) -> int:
    if any(plain.is_cuda for plain in every):
        from consumers.learners.fingerprint_gpu import digest_there

        return digest_there(every)
    hashed = xxh3_64()
    for plain in every:
        hashed.update(plain.view(torch.uint8).numpy())
    return hashed.intdigest()


def _sampled(plain: torch.Tensor) -> torch.Tensor:
    """Return the elements that size and sketch are taken of, in rows of a block or as they are."""
    if plain.numel() <= _WHOLE:
        return plain.float()
    blocks = plain[: plain.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK)
    return blocks[::_EVERY].float().reshape(-1)


def folded(values: torch.Tensor) -> torch.Tensor:
    """Return the sketch of a flat tensor, in fp64."""
    full = values.numel() // WIDTH * WIDTH
    sums = values[:full].view(-1, WIDTH).sum(0).double()
    sums[: values.numel() - full] += values[full:].double()
    return sums


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return about how far two vectors are apart, by their sketches."""
    return float(np.linalg.norm(ours - theirs))
