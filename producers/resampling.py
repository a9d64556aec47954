"""Finds groups that teach nothing, since all their rewards are alike, so that others are drawn instead.

Which groups these are follows from the samples alone, and each replacement follows from the number of the
group that it replaces. So a feeder that starts again finds the same groups, and the trainer knows without
being told what to wait for. Feeder and trainer count only fit samples, by the same rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from infra.roles.context import RoleContext
from producers.sample_feed import AdmittedSample, SampleFeed
from schemas.admission import tells_nothing
from schemas.identity import round_of
from schemas.messages import TRAIN


@dataclass(frozen=True)
class GroupPlace:
    """A group, and the iteration and its step (`mini`) that it belongs to."""

    group: int
    iteration: int
    mini: int


class Resampling:
    """Collects rewards by group. `found` returns each group that is to be replaced, once."""

    def __init__(self, context: RoleContext, feed: SampleFeed, trained: int) -> None:
        """`trained`: how many iterations are trained; their groups are not replaced."""
        self._trained = trained
        self._most = context.spec.loss.most_draws
        self._size = context.spec.algorithm.group_size
        self._samples = feed.subscribe(self._wanted) if self._most else None
        self._rewards: dict[GroupPlace, dict[int, float]] = {}

    def found(self, trained: int) -> list[GroupPlace]:
        """Return the groups that were completed since the last call and teach nothing.

        `trained`: how many iterations are trained; their groups are left out.
        """
        if self._samples is None:
            return []
        if trained > self._trained:
            self._trained = trained
            self._rewards = {
                place: known for place, known in self._rewards.items() if place.iteration >= trained
            }
        return [place for place, index, reward in self._samples.take() if self._take(place, index, reward)]

    def _wanted(self, taken: AdmittedSample) -> tuple[GroupPlace, int, float] | None:
        """Pick a fit training sample. Called in the feed's thread; the trainer reports unfit samples."""
        sample = taken.sample
        if taken.fault or sample.purpose != TRAIN or round_of(sample.group) >= self._most:
            return None
        reward = math.nan if sample.reward_error else sample.reward
        return GroupPlace(sample.group, sample.iteration, sample.mini), sample.index, reward

    def _take(self, place: GroupPlace, index: int, reward: float) -> bool:
        """Count a sample. Return whether it completes a group that teaches nothing."""
        if place.iteration < self._trained:
            return False
        known = self._rewards.setdefault(place, {})
        if index in known:
            return False
        known[index] = reward
        return len(known) == self._size and tells_nothing(known.values())
