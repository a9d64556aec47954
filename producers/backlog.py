"""What a generator was given and has not begun: the oldest iteration first, then the longest."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator

from producers.jobs import Job, Key


class Backlog:
    """Jobs that wait, by the weights version that they need."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int, int], Job]] = []

    def add(self, job: Job) -> None:
        """Take a job in."""
        heapq.heappush(self._heap, (job.rank, job))

    def take(self, version: int) -> Job | None:
        """The next job that weights of `version` may do."""
        if self._heap and self._heap[0][1].prompt.min_version <= version:
            return heapq.heappop(self._heap)[1]
        return None

    def give_back(self, keys: Container[Key]) -> list[Job]:
        """Those of the jobs that are still here; they are not any more."""
        found = [job for job in self if job.key in keys]
        self._heap = [entry for entry in self._heap if entry[1].key not in keys]
        heapq.heapify(self._heap)
        return found

    def needs(self) -> int | None:
        """The weights version that the next job waits for."""
        return self._heap[0][1].prompt.min_version if self._heap else None

    def __iter__(self) -> Iterator[Job]:
        return (job for _, job in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
