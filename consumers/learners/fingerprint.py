"""Fingerprints of large vectors: whether two are equal to the bit, and about how far apart they are.

A vector is the elements of some tensors, end to end. The digest covers all bits; on a GPU it is another
number, as it is computed there, and the bits would differ between devices anyway. Size and sketch are taken
of every eighth block of a large tensor, to save time: they only say by how much two vectors differ.

    vector ──► sums of its elements 0, 16, 32, …; of 1, 17, 33, …; and so on ──► sketch (16 numbers)

The sketch of a difference is the difference of the sketches. Its length is about that of the difference
itself, as errors have no common sign.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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


def fingerprint(tensors: Iterable[torch.Tensor], size: int | None = None) -> Fingerprint:
    """Return the fingerprint of these tensors' elements.

    With `size`, the bytes of all of them, each tensor is done with before the next one is asked for.
    """
    if size is None:
        tensors = list(tensors)
        size = sum(one.nbytes for one in tensors)
    seen = _Seen()
    digest = _digest(seen.passed(tensors), size)
    return seen.fingerprint(digest)


class _Seen:
    """Size and sketch of the tensors that pass by."""

    def __init__(self) -> None:
        self._norms: list[torch.Tensor] = []
        self._sketches: list[torch.Tensor] = []
        self._shares: list[float] = []
        self._count = 0

    def passed(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        for one in tensors:
            plain = one.detach().reshape(-1)
            some = _sampled(plain)
            self._shares.append(plain.numel() / max(1, some.numel()))
            self._norms.append(torch.linalg.vector_norm(some))
            self._sketches.append(folded(some))
            self._count += plain.numel()
            yield plain

    def fingerprint(self, digest: int) -> Fingerprint:
        # All that comes from a GPU comes at once: to wait for each number takes longer than to compute it.
        norms, sketches = _brought(self._norms), _brought(self._sketches)
        squares, sketch = 0.0, np.zeros(WIDTH)
        for share, norm, sums in zip(self._shares, norms, sketches, strict=True):
            squares += share * float(norm) ** 2
            sketch += math.sqrt(share) * sums
        return Fingerprint(digest, math.sqrt(squares), tuple(sketch.tolist()), self._count)


def _brought(numbers: Sequence[torch.Tensor]) -> np.ndarray:
    found: np.ndarray = (torch.stack(list(numbers)) if numbers else torch.empty(0)).cpu().numpy()
    return found


def _digest(tensors: Iterator[torch.Tensor], size: int) -> int:
    first = next(tensors, torch.empty(0))
    every = itertools.chain([first], tensors)
    if first.is_cuda:
        from consumers.learners.fingerprint_gpu import digest_there

        return digest_there(every, size, first.device)
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
