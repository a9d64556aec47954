"""The dispatch policy `round_robin`, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from producers.dispatch.board import Board
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import DealtPolicy, PolicySettings
from schemas.runspec import RunSpec


class RoundRobinSettings(PolicySettings):
    """Settings of round_robin."""

    def make(self, spec: RunSpec) -> RoundRobin:
        return RoundRobin()


class RoundRobin(DealtPolicy):
    """Dealt in order of admission; the longest first on each generator."""

    longest_first = True

    def deal(
        self, board: Board, jobs: Sequence[SampleJob], names: Sequence[str]
    ) -> dict[str, list[SampleJob]]:
        ordered = sorted(jobs, key=lambda job: job.key)
        return {name: ordered[place :: len(names)] for place, name in enumerate(names)}
