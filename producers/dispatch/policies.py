"""The policies that dispatch is compared with; `deadline.py` has ours, `algorithm2.py` the paper's."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

from producers.dispatch.board import Board, Instance
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from schemas.identity import SampleKey


class Policy(Protocol):
    """Decides what a free slot gets."""

    @property
    def ranks(self) -> GroupBeliefs | None:
        """What it believes of lengths, which is corrected as samples finish; None: it goes by predictions."""

    @property
    def by_deadline(self) -> bool:
        """Whether it decides by what is believed of jobs that run, too; else only of those that wait."""

    def corrected(self, board: Board, keys: Sequence[SampleKey]) -> None:
        """Something else is believed of these."""

    def tick(self, board: Board, now: float) -> bool:
        """Time has passed. True if all instances shall be asked again."""

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None:
        """Jobs came; they are on the board."""

    def regrouped(self, board: Board, now: float) -> None:
        """An instance joined or left; what it ran waits again."""

    def finished(self, board: Board, instance: Instance, job: SampleJob, length: int, now: float) -> None:
        """A sample is done."""

    @property
    def wakes_at(self) -> float:
        """When it wants to be asked at the latest, whatever happens."""

    def take_moves(self) -> Sequence[tuple[SampleKey, str]]:
        """Running jobs that another instance shall go on with, and which; each is said once."""

    def moved(self, board: Board) -> None:
        """They do."""

    def fill(
        self, board: Board, asked: Sequence[Instance], now: float
    ) -> Iterator[tuple[Instance, SampleKey]]:
        """The jobs to start and where, one by one: each is started before the next one is asked for.

        Its end leaves the free slots of those that are asked empty.
        """


class _Steady:
    """What a policy that never changes its mind has to say."""

    wakes_at = float("inf")
    ranks: GroupBeliefs | None = None
    by_deadline = False

    def corrected(self, board: Board, keys: Sequence[SampleKey]) -> None: ...

    def tick(self, board: Board, now: float) -> bool:
        return False

    def finished(self, board: Board, instance: Instance, job: SampleJob, length: int, now: float) -> None: ...

    def take_moves(self) -> Sequence[tuple[SampleKey, str]]:
        return []

    def moved(self, board: Board) -> None: ...

    def fill(
        self, board: Board, asked: Sequence[Instance], now: float
    ) -> Iterator[tuple[Instance, SampleKey]]:
        """The emptiest first. With hundreds of instances nobody looks through all of them for each job."""
        heap = [(len(one.running) / one.slots, place) for place, one in enumerate(asked) if one.free > 0]
        heapq.heapify(heap)
        while heap and board.waiting:
            place = heap[0][1]
            instance = asked[place]
            if (key := self.next(board, instance)) is None:
                heapq.heappop(heap)
                continue
            yield instance, key
            if instance.free > 0:
                heapq.heapreplace(heap, (len(instance.running) / instance.slots, place))
            else:
                heapq.heappop(heap)

    def next(self, board: Board, instance: Instance) -> SampleKey | None:
        """What a free slot of this instance takes."""
        raise NotImplementedError


class LongestFirst(_Steady):
    """One queue for all, the longest first: the best of the simple ones."""

    def __init__(self, ranks: GroupBeliefs | None = None) -> None:
        self.ranks = ranks

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None: ...

    def regrouped(self, board: Board, now: float) -> None: ...

    def next(self, board: Board, instance: Instance) -> SampleKey | None:
        return board.waiting.longest()


class _Dealt(_Steady):
    """Jobs are dealt to instances when they come, and stay there."""

    longest_first = False

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[float, SampleKey]]] = {}

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None:
        names = sorted(board.instances)
        for name, queue in self._queues.items():  # what others did, or nobody needs, is not kept
            self._queues[name] = [entry for entry in queue if entry[1] in board.waiting]
        if not names or not jobs:
            return
        for name, mine in self.deal(board, jobs, names).items():
            queue = self._queues.setdefault(name, [])
            if self.longest_first:
                queue += [(job.prompt.predicted, job.key) for job in mine]
                queue.sort()
            else:
                queue[:0] = [(0.0, job.key) for job in reversed(mine)]

    def deal(
        self, board: Board, jobs: Sequence[SampleJob], names: Sequence[str]
    ) -> dict[str, list[SampleJob]]:
        """Which instance gets which."""
        raise NotImplementedError

    def regrouped(self, board: Board, now: float) -> None:
        """Jobs of instances that are gone, and those that nobody was there for, are dealt anew."""
        self._queues = {name: queue for name, queue in self._queues.items() if name in board.instances}
        dealt = {key for queue in self._queues.values() for _, key in queue}
        self.admitted(board, [job for job, _ in board.waiting if job.key not in dealt], now)

    def next(self, board: Board, instance: Instance) -> SampleKey | None:
        queue = self._queues.get(instance.name, [])
        while queue:
            key = queue.pop()[1]
            if key in board.waiting:
                return key
        return None


class RandomFifo(_Dealt):
    """Shuffled, dealt evenly, first come first served."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def deal(
        self, board: Board, jobs: Sequence[SampleJob], names: Sequence[str]
    ) -> dict[str, list[SampleJob]]:
        shuffled = list(jobs)
        self._random.shuffle(shuffled)
        return {name: shuffled[place :: len(names)] for place, name in enumerate(names)}


class RoundRobin(_Dealt):
    """Dealt in order of admission; longest first on each instance."""

    longest_first = True

    def deal(
        self, board: Board, jobs: Sequence[SampleJob], names: Sequence[str]
    ) -> dict[str, list[SampleJob]]:
        ordered = sorted(jobs, key=lambda job: job.key)
        return {name: ordered[place :: len(names)] for place, name in enumerate(names)}
