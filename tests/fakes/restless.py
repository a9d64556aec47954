"""A feeder whose dispatcher moves running samples all the time: `python -m tests.fakes.restless`."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

from infra.roles.entry import run_role
from producers import feeder
from producers.dispatch import service
from producers.dispatch.board import Board
from producers.dispatch.policies.longest_first_policy import LongestFirst
from schemas.identity import SampleKey
from schemas.runspec import RunSpec

EVERY_S = 0.3


class Restless(LongestFirst):
    """Longest first, and now and then something that runs goes on elsewhere."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._next = 0.0
        self._moves: list[tuple[SampleKey, str]] = []

    def tick(self, board: Board, now: float) -> bool:
        for generator in board.generators.values():
            generator.advance(now)
        running = [
            (key, i.name) for i in board.generators.values() for key in i.running if i.tokens(key) >= 1
        ]
        if running and len(board.generators) > 1 and now >= self._next:
            self._next = now + EVERY_S
            key, source = self._random.choice(running)
            self._moves = [(key, self._random.choice([n for n in board.generators if n != source]))]
        return False

    def take_moves(self) -> Sequence[tuple[SampleKey, str]]:
        moves, self._moves = self._moves, []
        return moves


def restless(spec: RunSpec) -> Restless:
    """In place of the policy that the run file names."""
    return Restless()


if __name__ == "__main__":
    service.policy_of = restless  # type: ignore[assignment]
    sys.exit(run_role("feeder", feeder.body))
