"""The groups that were trained before their turn (`algorithm.order: arrival`), so that none is trained twice.

With order window the number of a group says when it is trained, and nothing has to be kept. With order
arrival the ledger says it. Kept are only groups that a later iteration might train: those of the newest
`staleness` + `staleness_cap` iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import numpy as np

from schemas.admission import admissible, first_open, latest_iteration
from schemas.algorithm import AlgorithmSection
from schemas.identity import ROUND
from schemas.messages import StepRecord


def trained_first(step: StepRecord, algorithm: AlgorithmSection) -> np.ndarray:
    """Return which rows of a step are of groups that it trains for the first time; the others are replayed.

    A replayed group is one of an earlier iteration (`loss.replay`).
    """
    if algorithm.order == "window":
        return np.asarray(step.groups % ROUND // algorithm.groups == step.iteration)
    return np.arange(step.groups.size) >= step.replayed


class TakenGroups:
    """Groups that were trained, of those that could still be. `redrawn`: another group takes their place."""

    def __init__(
        self,
        algorithm: AlgorithmSection,
        iteration: int = 0,
        taken: Iterable[int] = (),
        redrawn: Collection[int] = (),
    ) -> None:
        """`iteration`: the next one to train."""
        self._algorithm, self._iteration = algorithm, iteration
        self._final = {group: group not in redrawn for group in taken}
        self._settled = {group % ROUND for group, final in self._final.items() if final}

    def add(self, step: StepRecord, redrawn: Collection[int] = ()) -> None:
        """Note the groups that a step has trained. `redrawn`: those that are drawn again."""
        if self._algorithm.order == "arrival":
            for group in np.unique(step.groups[trained_first(step, self._algorithm)]).tolist():
                self._final[group] = group not in redrawn
                if group not in redrawn:
                    self._settled.add(group % ROUND)
        self.begin(step.iteration + step.last_of_iteration)

    def make_up(self, step: int) -> None:
        """Make up for the steps before `step` whose records are lost.

        Nobody knows which groups they trained. The first ones that could still be trained count as theirs.
        """
        if self._algorithm.order == "window":
            return
        first = first_open(self._iteration, self._algorithm)
        trained = step * self._algorithm.groups // self._algorithm.optimizer_steps
        lost = trained - first - len(self._settled)
        for group in itertools.count(first):
            if lost <= 0:
                return
            if group not in self._settled:
                self._final[group] = True
                self._settled.add(group)
                lost -= 1

    def begin(self, iteration: int) -> None:
        """Forget groups that no iteration from this one on may train."""
        if iteration > self._iteration:
            self._iteration = iteration
            self._final = {
                group: final
                for group, final in self._final.items()
                if latest_iteration(group, self._algorithm) >= iteration
            }
            self._settled = {group % ROUND for group, final in self._final.items() if final}

    def __contains__(self, group: int) -> bool:
        """Whether no step will train this group any more."""
        if self._algorithm.order == "window":
            return False
        return (
            group in self._final
            or group % ROUND in self._settled
            or latest_iteration(group, self._algorithm) < self._iteration
        )

    def known(self) -> list[int]:
        """Return the groups that are kept."""
        return sorted(self._final)

    def redrawn(self) -> list[int]:
        """Return those of them that are drawn again."""
        return sorted(group for group, final in self._final.items() if not final)

    def waiting(self) -> list[int]:
        """Return those of them in whose place no other group is trained yet."""
        return [group for group in self.redrawn() if group % ROUND not in self._settled]

    def open_by_iteration(self) -> dict[int, int]:
        """Return how many admitted groups are still to be trained, by the last iteration that may."""
        algorithm, cap = self._algorithm, int(self._algorithm.most_stale)
        most = algorithm.iterations * algorithm.groups

        def admitted(version: int) -> int:
            if version < 0:
                return 0
            return min(most, admissible(version, algorithm.groups, algorithm.lookahead))

        found = {
            latest: admitted(latest - cap) - admitted(latest - cap - 1)
            for latest in range(self._iteration, self._iteration + cap + 1)
        }
        for group in self._settled:
            latest = latest_iteration(group, algorithm)
            if latest in found:
                found[latest] -= 1
        return found
