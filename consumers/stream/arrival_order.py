"""Decides which whole groups an optimizer step takes, in the order of arrival, so that none gets too old.

A group has to be trained by some iteration: the weights that drew it may be `staleness_cap` iterations old.
A step may take any group as long as all others can still be trained in time:

    for each iteration T:   groups left that have to be trained by T   <=   places left in iterations up to T
"""

from __future__ import annotations

from schemas.admission import latest_iteration
from schemas.algorithm import AlgorithmSection
from schemas.taken import TakenGroups


class ArrivalOrder:
    """The places of one optimizer step."""

    def __init__(self, algorithm: AlgorithmSection, taken: TakenGroups, iteration: int, mini: int) -> None:
        """`taken`: the groups of all steps before this one."""
        self._algorithm, self._iteration = algorithm, iteration
        self.left = algorithm.groups // algorithm.optimizer_steps
        self._places = algorithm.groups - mini * self.left  # of the iteration, from this step on
        self._open = sorted(taken.open_by_iteration().items())
        self.latest = self._latest()

    def takes(self, group: int) -> bool:
        """Whether the step may take this group now."""
        return self.left > 0 and latest_iteration(group, self._algorithm) <= self.latest

    def took(self, group: int) -> None:
        """Note that the step has taken a group."""
        latest = latest_iteration(group, self._algorithm)
        self._open = [(by, count - (by == latest)) for by, count in self._open]
        self.left -= 1
        self._places -= 1
        self.latest = self._latest()

    def _latest(self) -> float:
        """Return until when a group may be trained to be taken now: those of later ones must wait."""
        due = 0
        for by, count in self._open:
            due += count
            if due > self._places - 1 + (by - self._iteration) * self._algorithm.groups:
                return by
        return float("inf")
