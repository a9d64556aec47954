"""What a generator was given and has not begun: the oldest iteration first, then the longest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator

from producers.dispatch.jobs import SampleJob, Turn
from schemas.identity import SampleKey


class Backlog:
    """Jobs that wait, by the weights version that they need."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Turn, float, int, int], SampleJob]] = []
        self._keys: set[SampleKey] = set()

    def add(self, job: SampleJob) -> None:
        """Take a job in."""
        heapq.heappush(self._heap, (job.rank, job))
        self._keys.add(job.key)

    def take(self, version: int) -> SampleJob | None:
        """The next job that weights of `version` may do."""
        if self._heap and self._heap[0][1].needs <= version:
            job = heapq.heappop(self._heap)[1]
            self._keys.discard(job.key)
            return job
        return None

    def give_back(self, keys: Container[SampleKey]) -> list[SampleJob]:
        """Those of the jobs that are still here; they are not any more."""
        return self.take_out(lambda job: job.key in keys)

    def take_out(self, which: Callable[[SampleJob], bool]) -> list[SampleJob]:
        """The jobs of which it is true; they are not here any more."""
        found = [job for job in self if which(job)]
        if found:
            self._keys.difference_update(job.key for job in found)
            self._heap = [entry for entry in self._heap if entry[1].key in self._keys]
            heapq.heapify(self._heap)
        return found

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._keys

    def needs(self) -> int | None:
        """The weights version that the next job waits for."""
        return self._heap[0][1].needs if self._heap else None

    def __iter__(self) -> Iterator[SampleJob]:
        return (job for _, job in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
