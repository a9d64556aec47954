"""The places of groups that a ledger records as trained, in the order in which they were trained first."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from consumers.batches.log_places import LogPlace
from schemas.algorithm import AlgorithmSection
from schemas.messages import StepRecord
from schemas.taken import trained_first


class Recorded:
    """Places of the groups of a ledger's steps, in the order in which these were trained first.

    A group that a step replayed is not counted again. To save memory, only places are kept, and only of the
    newest `kept` iterations.
    """

    def __init__(
        self, algorithm: AlgorithmSection, steps: Iterable[StepRecord] = (), *, kept: float = math.inf,
        before: Iterable[StepPlaces] = (),
    ) -> None:  # fmt: skip
        """`algorithm`: of the run that took the steps. `kept`: number of newest iterations to keep.

        `before`: places of older steps, which the ledger does not have.
        """
        self._algorithm, self._kept, self._newest = algorithm, kept, -1
        self._steps: deque[StepPlaces] = deque()
        self._before = 0  # groups of steps that were dropped
        self._ends: list[int] = []  # number of groups up to and including each step
        for places in before:
            self._append(places)
        for step in steps:
            self.add(step)

    def add(self, step: StepRecord) -> None:
        """Add a step of the ledger. A step that was added before is ignored."""
        if step.step <= self._newest:
            return  # of a trainer thought dead, or read again: the first record of a step counts
        self._newest = step.step
        order = np.flatnonzero(trained_first(step, self._algorithm))
        order = order[np.lexsort((step.indexes[order], step.groups[order]))]
        _, starts = np.unique(step.groups[order], return_index=True)
        self._append(
            StepPlaces(
                step.iteration, step.partitions[order].astype(np.int16), step.offsets[order].copy(), starts
            )
        )
        while self._steps[0].iteration <= step.iteration - self._kept:
            self._steps.popleft()
            self._before = self._ends.pop(0)

    def _append(self, step: StepPlaces) -> None:
        self._steps.append(step)
        self._ends.append((self._ends[-1] if self._ends else self._before) + step.starts.size)

    def drop(self, begins: Mapping[int, int]) -> None:
        """Drop steps with samples before these positions, which are gone from the log."""
        least = np.array([begins.get(number, 0) for number in range(max(begins, default=0) + 1)])
        steps, self._steps, self._ends, self._before = self._steps, deque(), [], 0
        for step in steps:
            if (step.partitions < least.size).all() and (step.offsets >= least[step.partitions]).all():
                self._append(step)

    def __iter__(self) -> Iterator[StepPlaces]:
        return iter(self._steps)

    def __len__(self) -> int:
        return self._ends[-1] - self._before if self._ends else 0

    def places(self, numbers: Iterable[int]) -> list[LogPlace]:
        """Return the places of all samples of some groups; groups are counted from 0."""
        found: list[LogPlace] = []
        for number in numbers:
            at = bisect.bisect_right(self._ends, number + self._before)
            found += self._steps[at].places(
                number + self._before - (self._ends[at - 1] if at else self._before)
            )
        return found


@dataclass(frozen=True)
class StepPlaces:
    """The places of the groups that one step trained first."""

    iteration: int
    partitions: np.ndarray  # of each sample, group by group, in order of index
    offsets: np.ndarray
    starts: np.ndarray  # index of each group's first sample in these arrays

    def places(self, group: int) -> list[LogPlace]:
        """Return the places of a group's samples."""
        last = group + 1 == self.starts.size
        part = slice(int(self.starts[group]), None if last else int(self.starts[group + 1]))
        return list(zip(self.partitions[part].tolist(), self.offsets[part].tolist(), strict=True))
