"""The board as arrays, for the compiled simulation of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from producers.dispatch.beliefs import Kin
from producers.dispatch.board import NO_DEADLINE, Board
from producers.dispatch.group_beliefs import GroupBeliefs
from schemas.identity import SampleKey

Setting = tuple[float, float]  # quantile, seconds from now to the deadline
LONGEST_FIRST: Setting = 0.5, NO_DEADLINE


def compiled() -> Any:
    """Import the compiled module when first needed: numba takes a second, and small runs never need it."""
    from producers.dispatch import makespan

    return makespan


@dataclass
class SampleTable:
    """Waiting and running samples, one row each."""

    beliefs: np.ndarray
    predicted: np.ndarray
    kin: Kin | None
    keys: Sequence[SampleKey]
    names: Sequence[str]  # of generators
    order: np.ndarray
    where: np.ndarray
    tokens: np.ndarray
    tables: np.ndarray
    slots: np.ndarray
    stalls: np.ndarray

    def expected(self, draws: np.ndarray, setting: Setting, critical: np.ndarray | None = None) -> float:
        """Return the mean makespan in seconds. `critical[i]` is raised each time that sample i ends last."""
        counts = np.zeros(len(self.where), np.int64) if critical is None else critical
        return float(
            compiled().expected(
                draws, self.beliefs, self.order, self.where, self.tokens, self.tables, self.slots,
                self.stalls, *setting, counts,
            )
        )  # fmt: skip

    def batch(self) -> np.ndarray:
        """Return how many samples run on each generator."""
        return np.bincount(self.where[self.where >= 0], minlength=len(self.slots))

    def move(self, row: int, target: int, stall_s: float) -> None:
        """Move a running sample to another generator, which loses `stall_s` seconds by it."""
        self.where[row] = target
        self.stalls[target] += stall_s


def state_of(board: Board, group_beliefs: GroupBeliefs, now: float) -> SampleTable:
    """Return the table of the present board."""
    generators = board.fastest_first
    jobs = [(job, -1, 0.0) for job, _ in board.waiting]
    for place, generator in enumerate(generators):
        generator.advance(now)
        # jobs beyond its slots wait at the generator: for the plan, as if they waited here
        ordered = sorted(generator.running.items(), key=lambda item: item[1].order_key)
        jobs += [(job, place, generator.tokens(key)) for key, job in ordered[: generator.slots]]
        jobs += [(job, -1, 0.0) for _, job in ordered[generator.slots :]]
    most = max(generator.slots for generator in generators)
    tables = np.full((len(generators), most + 1), NO_DEADLINE)
    for place, generator in enumerate(generators):
        tables[place, : generator.slots + 1] = generator.seconds
    return SampleTable(
        beliefs=np.stack([group_beliefs.row[job.key] for job, _, _ in jobs]),
        predicted=np.array([job.prompt.predicted for job, _, _ in jobs]),
        kin=group_beliefs.kin([job for job, _, _ in jobs]), keys=[job.key for job, _, _ in jobs],
        names=[generator.name for generator in generators],
        order=np.argsort(np.array([group_beliefs.expected_length(job) for job, _, _ in jobs]), kind="stable"),
        where=np.array([where for _, where, _ in jobs]),
        tokens=np.array([tokens for _, _, tokens in jobs]), tables=tables,
        slots=np.array([generator.slots for generator in generators]), stalls=np.zeros(len(generators)),
    )  # fmt: skip
