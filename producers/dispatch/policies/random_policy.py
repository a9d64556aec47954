"""The dispatch policy `random`, for comparison."""

from __future__ import annotations

import random
from collections.abc import Sequence

from producers.dispatch.board import Board
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import DealtPolicy, PolicySettings
from schemas.runspec import RunSpec


class RandomSettings(PolicySettings):
    """Settings of random."""

    def make(self, spec: RunSpec) -> RandomFifo:
        return RandomFifo(spec.seed)


class RandomFifo(DealtPolicy):
    """Shuffled, dealt evenly; first come, first served."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def deal(
        self, board: Board, jobs: Sequence[SampleJob], names: Sequence[str]
    ) -> dict[str, list[SampleJob]]:
        shuffled = list(jobs)
        self._random.shuffle(shuffled)
        return {name: shuffled[place :: len(names)] for place, name in enumerate(names)}
