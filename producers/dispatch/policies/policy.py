"""The interface of a dispatch policy, its settings, and what simple policies have in common."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from schemas.dispatching import POLICIES, DispatchSection
from schemas.identity import SampleKey
from schemas.runspec import RunSpec


class Policy(Protocol):
    """A dispatch policy: decides which jobs free slots get."""

    @property
    def group_beliefs(self) -> GroupBeliefs | None:
        """The beliefs of lengths, corrected as samples finish; None: the policy goes by predictions."""

    @property
    def by_deadline(self) -> bool:
        """Whether the policy also uses beliefs of running jobs, not only of waiting ones."""

    def corrected(self, board: Board, keys: Sequence[SampleKey]) -> None:
        """Called when the beliefs of these jobs have changed."""

    def tick(self, board: Board, now: float) -> bool:
        """Called when time has passed. Return True to have all generators asked again."""

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None:
        """Called when jobs came; they are on the board."""

    def regrouped(self, board: Board, now: float) -> None:
        """Called when a generator joined or left. The jobs of one that left wait again."""

    def finished(
        self, board: Board, generator: BoardGenerator, job: SampleJob, length: int, now: float
    ) -> None:
        """Called when a sample is done."""

    @property
    def wakes_at(self) -> float:
        """When the policy has to be asked again at the latest."""

    def take_moves(self) -> Sequence[tuple[SampleKey, str]]:
        """Return running jobs that shall move, each with its new generator. Each move is returned once."""

    def moved(self, board: Board) -> None:
        """Called after these moves were made."""

    def counters(self) -> Mapping[str, float]:
        """Return figures of the policy for the feeder's heartbeats."""

    def words(self) -> tuple[str, str]:
        """Return the rule in force and the reason for it, for the log."""

    def fill(
        self, board: Board, asked: Sequence[BoardGenerator], now: float
    ) -> Iterator[tuple[BoardGenerator, SampleKey]]:
        """Yield the jobs to start and their generators. Each job is started before the next one is asked for.

        Slots of the generators in `asked` that are still free at the end stay empty.
        """


class PolicySettings(DispatchSection, ABC):
    """The settings of a dispatch policy. A file that adds a policy extends this class."""

    @abstractmethod
    def make(self, spec: RunSpec) -> Policy:
        """Return the policy of a run."""


def policy_of(spec: RunSpec) -> Policy:
    """Return the dispatch policy that the run file names."""
    settings = POLICIES.loaded(spec.dispatch)
    assert isinstance(settings, PolicySettings)
    return settings.make(spec)


class SteadyPolicy:
    """Defaults for a dispatch policy that never changes its decisions."""

    wakes_at = float("inf")
    group_beliefs: GroupBeliefs | None = None
    by_deadline = False

    def corrected(self, board: Board, keys: Sequence[SampleKey]) -> None: ...

    def tick(self, board: Board, now: float) -> bool:
        return False

    def finished(
        self, board: Board, generator: BoardGenerator, job: SampleJob, length: int, now: float
    ) -> None: ...

    def take_moves(self) -> Sequence[tuple[SampleKey, str]]:
        return []

    def moved(self, board: Board) -> None: ...

    def counters(self) -> Mapping[str, float]:
        return {}

    def words(self) -> tuple[str, str]:
        return "by one rule", "it never changes"

    def fill(
        self, board: Board, asked: Sequence[BoardGenerator], now: float
    ) -> Iterator[tuple[BoardGenerator, SampleKey]]:
        """Fill the emptiest generator first.

        A heap saves looking through hundreds of generators for each job.
        """
        heap = [(len(one.running) / one.slots, place) for place, one in enumerate(asked) if one.free > 0]
        heapq.heapify(heap)
        while heap and board.waiting:
            place = heap[0][1]
            generator = asked[place]
            if (key := self.next(board, generator)) is None:
                heapq.heappop(heap)
                continue
            yield generator, key
            if generator.free > 0:
                heapq.heapreplace(heap, (len(generator.running) / generator.slots, place))
            else:
                heapq.heappop(heap)

    def next(self, board: Board, generator: BoardGenerator) -> SampleKey | None:
        """Return the job for a free slot of this generator; None to leave the slot empty."""
        raise NotImplementedError


class DealtPolicy(SteadyPolicy):
    """Deals jobs to generators when they are admitted; they stay there."""

    longest_first = False

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[float, SampleKey]]] = {}

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None:
        names = sorted(board.generators)
        for name, queue in self._queues.items():  # jobs that were done elsewhere or forgotten are dropped
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
        """Return the jobs by generator."""
        raise NotImplementedError

    def regrouped(self, board: Board, now: float) -> None:
        """Deal anew the jobs of generators that are gone, and jobs that came when there was no generator."""
        self._queues = {name: queue for name, queue in self._queues.items() if name in board.generators}
        dealt = {key for queue in self._queues.values() for _, key in queue}
        self.admitted(board, [job for job, _ in board.waiting if job.key not in dealt], now)

    def next(self, board: Board, generator: BoardGenerator) -> SampleKey | None:
        queue = self._queues.get(generator.name, [])
        while queue:
            key = queue.pop()[1]
            if key in board.waiting:
                return key
        return None
