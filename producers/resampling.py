"""Groups that told nothing: of `<run>.samples`, in whose place another one is to be drawn.

Which ones that are depends on the samples alone, and what is drawn instead on its number: so a feeder that
starts again finds the same, and the trainer knows without being told what it has to wait for. Both count only
samples that are fit, by the same rules.
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
    """A group, and where it belongs."""

    group: int
    window: int
    mini: int


class Resampling:
    """`found` is called now and then; each place is said once."""

    def __init__(self, context: RoleContext, feed: SampleFeed, trained: int) -> None:
        """`trained`: iterations that need no more."""
        self._trained = trained
        self._most = context.spec.loss.resample or 0
        self._size = context.spec.algorithm.group_size
        self._samples = feed.subscribe(self._wanted) if self._most else None
        self._rewards: dict[GroupPlace, dict[int, float]] = {}

    def found(self, trained: int) -> list[GroupPlace]:
        """Groups that are whole now and told nothing; `trained` iterations need no more."""
        if self._samples is None:
            return []
        if trained > self._trained:
            self._trained = trained
            self._rewards = {
                place: known for place, known in self._rewards.items() if place.window >= trained
            }
        return [place for place, index, reward in self._samples.take() if self._take(place, index, reward)]

    def _wanted(self, taken: AdmittedSample) -> tuple[GroupPlace, int, float] | None:
        """In the feed's thread; what is unfit the trainer reports, and it is made again."""
        sample = taken.sample
        if taken.fault or sample.purpose != TRAIN or round_of(sample.group) >= self._most:
            return None
        reward = math.nan if sample.reward_error else sample.reward
        return GroupPlace(sample.group, sample.window, sample.mini), sample.index, reward

    def _take(self, place: GroupPlace, index: int, reward: float) -> bool:
        """Whether it was the last of a group that told nothing."""
        if place.window < self._trained:
            return False
        known = self._rewards.setdefault(place, {})
        if index in known:
            return False
        known[index] = reward
        return len(known) == self._size and tells_nothing(known.values())
