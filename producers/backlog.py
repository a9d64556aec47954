"""What a generator has to do: its share of the admitted prompts, longest first, without what is done."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from infra.bus import Bus, read_all
from schemas.messages import TRAIN, Prompt, Sample, StepRecord
from schemas.topics import Topics
from schemas.wire import Unreadable, decode


@dataclass(order=True)
class Job:
    """One sample to make."""

    rank: tuple[int, float, int, int]  # oldest window first, then the longest
    prompt: Prompt = field(compare=False)
    index: int = field(compare=False)


def _key(prompt: Prompt | Sample, index: int) -> tuple[int, int]:
    return prompt.group, index


class Backlog:
    """Jobs that wait, by the weights version that they need."""

    def __init__(self, instance: int, instances: int) -> None:
        self._instance, self._instances = instance, max(1, instances)
        self._heap: list[Job] = []
        self._known: set[int] = set()
        self._done: set[tuple[int, int]] = set()
        self._trained = 0  # iterations in the ledger

    def recover(self, bus: Bus, topics: Topics, *, lookahead: float, deadline_s: float) -> None:
        """Learn from the log what was done before this process started.

        Samples of a window that is not trained yet come behind every sample of the windows that were trained
        before the first of them could be admitted: so only the log's end has to be read.
        """
        steps = [
            decode(record.value, StepRecord) for record in read_all(bus, topics.ledger, deadline_s=deadline_s)
        ]
        self._trained = max((step.iteration + 1 for step in steps if step.last_of_iteration), default=0)
        behind: dict[int, int] = {}
        for step in steps:
            if step.iteration < self._trained - lookahead - 1:
                for partition, offset in zip(step.partitions.tolist(), step.offsets.tolist(), strict=True):
                    behind[partition] = max(behind.get(partition, 0), offset + 1)
        for record in read_all(bus, topics.samples, behind, deadline_s=deadline_s):
            try:
                sample = decode(record.value, Sample)
            except Unreadable:
                continue
            self._done.add(_key(sample, sample.index))

    def add(self, prompt: Prompt) -> int:
        """Take a prompt in; how many samples of it are to be made here."""
        if prompt.group in self._known or prompt.group % self._instances != self._instance:
            return 0
        if prompt.purpose == TRAIN and prompt.window < self._trained:
            return 0
        self._known.add(prompt.group)
        fresh = [index for index in range(prompt.size) if _key(prompt, index) not in self._done]
        for index in fresh:
            rank = (prompt.min_version, -prompt.predicted, prompt.group, index)
            heapq.heappush(self._heap, Job(rank, prompt, index))
        return len(fresh)

    def take(self, version: int) -> Job | None:
        """The next job that weights of `version` may do."""
        if self._heap and self._heap[0].prompt.min_version <= version:
            return heapq.heappop(self._heap)
        return None

    def needs(self) -> int | None:
        """The weights version that the next job waits for."""
        return self._heap[0].prompt.min_version if self._heap else None

    def __len__(self) -> int:
        return len(self._heap)
