"""The fingerprint of a vector whose rows several ranks have: the digest does not depend on how many they are.

    row ──► hash, with the row's number ──┐
    row ──► hash, with the row's number ──┴─► their sum over all ranks, in which order does not matter

On a GPU, and where a row is one number, each element is hashed, with its own number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from consumers.learners import collective
from consumers.learners.fingerprint import WIDTH, Fingerprint, folded
from consumers.learners.sharded_model import Shard

_STRETCH = 1 << 22  # elements that are hashed at a time
_ALL = 1 << 64
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of SplitMix64
_LAST_SHIFT = 31


class ShardedFingerprint:
    """Takes in rows, parameter by parameter in the same order on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._digest, self._count = 0, 0  # `_count`: elements of all ranks
        self._sums: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, shard: Shard) -> None:
        """Add this rank's rows of a tensor that is cut as the shard is."""
        width = math.prod(shard.shape[1:])
        begin = self._count + shard.first * width
        flat = rows.reshape(-1)
        if flat.numel():
            hashed = _of_elements(flat, begin) if flat.is_cuda or width == 1 else _of_rows(flat, width, begin)
            self._digest += sum(hashed)
            sketch = folded(flat).roll(begin % WIDTH)
            self._sums.append(
                torch.cat([sketch, torch.linalg.vector_norm(flat, dtype=torch.float64)[None] ** 2])
            )
        self._count += math.prod(shard.shape)

    def found(self) -> Fingerprint:
        """Return the fingerprint of all ranks' rows, on all ranks."""
        none = torch.zeros(WIDTH + 1, dtype=torch.float64, device=self._device)
        sums = torch.stack([none, *self._sums]).sum(0)
        digest = torch.tensor(_signed(self._digest), device=self._device)
        collective.add_up(sums)
        collective.add_up(digest)
        *sketch, squares = sums.tolist()
        both = f"{int(digest) % _ALL} {self._count}"
        return Fingerprint(xxh3_64(both.encode()).intdigest(), math.sqrt(squares), tuple(sketch), self._count)


def _of_rows(flat: torch.Tensor, width: int, begin: int) -> Iterator[int]:
    raw, size = flat.view(torch.uint8).numpy().data, width * flat.itemsize
    for number, at in enumerate(range(0, len(raw), size)):
        yield xxh3_64_intdigest(raw[at : at + size], begin + number * width)


def _of_elements(flat: torch.Tensor, begin: int) -> Iterator[int]:
    for at in range(0, flat.numel(), _STRETCH):
        bits = flat[at : at + _STRETCH].view(torch.int32).long()
        number = torch.arange(begin + at, begin + at + bits.numel(), device=flat.device)
        mixed = (number << 32) ^ (number >> 32) ^ bits
        for shift, multiplier in _MULTIPLIERS:
            mixed = (mixed ^ _shifted(mixed, shift)) * _signed(multiplier)
        yield int((mixed ^ _shifted(mixed, _LAST_SHIFT)).sum())


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right as if there were no sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """Return the 64-bit integer with sign that has the same bits."""
    number %= _ALL
    return number - _ALL if number >= _ALL // 2 else number
