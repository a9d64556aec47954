"""Jobs in order of length, in blocks, so that a change costs no more among a million jobs than in one block.

    blocks   [3 5 8] [9 9 12] [15 40]        ascending lengths
    told     [4 4 9] [9 11 13] [16 38]       declared lengths, never falling within a block
    limits    9       13       38            the greatest declared length up to each block

A job's declared length counts for all that are longer than it: nothing that stands behind a job which is too
long for a slot is taken for it. That is the rule of `makespan`, whose array of keys never falls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from producers.dispatch.jobs import SampleJob
from schemas.identity import SampleKey

OrderedJob = tuple[float, SampleKey, SampleJob]  # the length, then the key, in which no two are equal
Teller = Callable[[Sequence[SampleJob]], Sequence[float]]  # gives jobs' declared lengths

_BLOCK = 256  # jobs; a block is split when it has twice as many


class LengthOrder:
    """Jobs in order of length. `tell`: gives their declared lengths; None: nobody asks for these."""

    def __init__(self, tell: Teller | None = None) -> None:
        self._tell = tell
        self._count = 0
        self._blocks: list[list[OrderedJob]] = []  # none is empty
        self._lasts: list[OrderedJob] = []  # of each block
        self._told: list[list[float]] = []
        self._most: list[float] = []  # the greatest that each block has had since it was made
        self._limits: list[float] | None = None  # the greatest of these so far; None: to be computed

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[OrderedJob]:
        return chain.from_iterable(self._blocks)

    def __getitem__(self, place: int) -> OrderedJob:
        """Return the shortest job at place 0, the longest at -1. Places far from an end take longer."""
        left = place if place >= 0 else place + self._count
        for block in self._blocks:
            if 0 <= left < len(block):
                return block[left]
            left -= len(block)
        raise IndexError(f"there is no job {place} of {self._count}")

    def add(self, fresh: Sequence[OrderedJob]) -> None:
        """Add jobs: many at once cost less than one by one."""
        if len(fresh) * 8 > self._count:
            self._build(sorted(chain(self, fresh)))
            return
        told = self._tell([job for _, _, job in fresh]) if self._tell is not None else [0.0] * len(fresh)
        for one, length in zip(fresh, told, strict=True):
            self._insert(one, length)

    def remove(self, one: OrderedJob) -> None:
        """Remove a job."""
        number = bisect_left(self._lasts, one)
        block = self._blocks[number]
        place = bisect_left(block, one)
        assert block[place][1] == one[1]
        del block[place]
        self._count -= 1
        if self._told:
            del self._told[number][place]
        if not block:
            del self._blocks[number], self._lasts[number]
            if self._told:
                del self._told[number], self._most[number]
                self._limits = None
        elif place == len(block):
            self._lasts[number] = block[-1]

    def declare(self, tell: Teller | None) -> None:
        """Have all declared lengths computed anew, by this function."""
        self._tell = tell
        self._build(list(self))

    def at(self, share: float) -> OrderedJob:
        """Return the job at about this share of the order, from 0 up to 1: the shortest at 0."""
        number, rest = divmod(share * len(self._blocks), 1)
        block = self._blocks[int(number)]
        return block[int(rest * len(block))]

    def from_the_longest(self, step: float) -> list[OrderedJob]:
        """Return jobs that are evenly spaced in the order, the longest first."""
        found: list[OrderedJob] = []
        passed = taken = 0  # jobs of later blocks; jobs that were returned
        for block in reversed(self._blocks):
            while (place := int(taken * step) - passed) < len(block):
                found.append(block[-1 - place])
                taken += 1
            passed += len(block)
        return found

    def longest(self) -> tuple[OrderedJob, float]:
        """Return the last job, and its declared length (0 if nobody tells)."""
        last = self._lasts[-1]
        if not self._told:
            return last, 0.0
        before = self._limited()[-2] if len(self._blocks) > 1 else 0.0
        return last, max(before, self._told[-1][-1])

    def within(self, most: float) -> tuple[OrderedJob, float] | None:
        """Return the last job before the first that is declared longer than `most`; None: there is none."""
        number = bisect_right(self._limited(), most)
        if number == len(self._blocks):
            return self.longest() if self._blocks else None
        place = bisect_right(self._told[number], most) - 1
        if place >= 0:
            before = self._limited()[number - 1] if number else 0.0
            return self._blocks[number][place], max(before, self._told[number][place])
        if number == 0:
            return None
        before = self._limited()[number - 2] if number > 1 else 0.0
        return self._lasts[number - 1], max(before, self._told[number - 1][-1])

    def _limited(self) -> list[float]:
        if self._limits is None:
            self._limits = list(accumulate(self._most, max))
        return self._limits

    def _build(self, jobs: list[OrderedJob]) -> None:
        self._count = len(jobs)
        self._blocks = [jobs[first : first + _BLOCK] for first in range(0, len(jobs), _BLOCK)]
        self._lasts = [block[-1] for block in self._blocks]
        self._told, self._most, self._limits = [], [], None
        if self._tell is not None:
            told = list(accumulate(self._tell([job for _, _, job in jobs]), max))
            self._told = [told[first : first + _BLOCK] for first in range(0, len(told), _BLOCK)]
            self._most = [block[-1] for block in self._told]

    def _insert(self, one: OrderedJob, told: float) -> None:
        number = min(bisect_left(self._lasts, one), len(self._blocks) - 1)
        block = self._blocks[number]
        place = bisect_left(block, one)
        block.insert(place, one)
        self._count += 1
        self._lasts[number] = block[-1]
        if self._tell is not None:
            self._say(number, place, float(told))
        if len(block) > 2 * _BLOCK:
            self._split(number)

    def _say(self, number: int, place: int, length: float) -> None:
        told = self._told[number]
        if place:
            length = max(length, told[place - 1])
        told.insert(place, length)
        for later in range(place + 1, len(told)):
            if told[later] >= length:
                break
            told[later] = length
        if length > self._most[number]:
            self._most[number] = length
            self._limits = None

    def _split(self, number: int) -> None:
        block = self._blocks[number]
        self._blocks[number : number + 1] = block[:_BLOCK], block[_BLOCK:]
        self._lasts[number : number + 1] = block[_BLOCK - 1], block[-1]
        if self._told:
            told, most = self._told[number], self._most[number]
            self._told[number : number + 1] = told[:_BLOCK], told[_BLOCK:]
            self._most[number : number + 1] = told[_BLOCK - 1], most
            self._limits = None
