"""The dispatch policy `longest_first`, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import PolicySettings, SteadyPolicy
from schemas.identity import SampleKey
from schemas.runspec import RunSpec


class LongestFirstSettings(PolicySettings):
    """Settings of longest_first."""

    def make(self, spec: RunSpec) -> LongestFirst:
        return LongestFirst()


class LongestFirst(SteadyPolicy):
    """One queue for all generators, the longest job first: the best of the simple policies."""

    def __init__(self, group_beliefs: GroupBeliefs | None = None) -> None:
        self.group_beliefs = group_beliefs

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None: ...

    def regrouped(self, board: Board, now: float) -> None: ...

    def next(self, board: Board, generator: BoardGenerator) -> SampleKey | None:
        return board.waiting.longest()
