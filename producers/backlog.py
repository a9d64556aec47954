"""A generator's jobs that are not begun, ordered: the oldest iteration first, then the longest prediction."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator

from producers.dispatch.jobs import SampleJob, Turn
from schemas.identity import SampleKey


class Backlog:
    """A queue of waiting jobs, in order of `SampleJob.order_key`."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Turn, float, int, int], SampleJob]] = []
        self._keys: set[SampleKey] = set()

    def add(self, job: SampleJob) -> None:
        """Add a job."""
        heapq.heappush(self._heap, (job.order_key, job))
        self._keys.add(job.key)

    def take(self, version: int) -> SampleJob | None:
        """Remove and return the next job, if weights of `version` may do it; else None."""
        if self._heap and self._heap[0][1].needs <= version:
            job = heapq.heappop(self._heap)[1]
            self._keys.discard(job.key)
            return job
        return None

    def give_back(self, keys: Container[SampleKey]) -> list[SampleJob]:
        """Remove and return those of the named jobs that are still here."""
        return self.take_out(lambda job: job.key in keys)

    def take_out(self, which: Callable[[SampleJob], bool]) -> list[SampleJob]:
        """Remove and return the jobs for which `which` is true."""
        found = [job for job in self if which(job)]
        if found:
            self._keys.difference_update(job.key for job in found)
            self._heap = [entry for entry in self._heap if entry[1].key in self._keys]
            heapq.heapify(self._heap)
        return found

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._keys

    def needs(self) -> int | None:
        """Return the version of the weights that the next job needs; None if there is no job."""
        return self._heap[0][1].needs if self._heap else None

    def __iter__(self) -> Iterator[SampleJob]:
        return (job for _, job in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
