"""Groups that told nothing: follows `<run>.samples` and says in whose place another one is to be drawn.

Which ones that are depends on the samples alone, and what is drawn instead on its number: so a feeder that
starts again finds the same, and the trainer knows without being told what it has to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from infra.process import Context
from producers.dispatch.recovery import behind
from schemas.admission import tells_nothing
from schemas.fitness import fault
from schemas.identity import round_of
from schemas.messages import TRAIN, Sample, StepRecord
from schemas.wire import Unreadable, decode


@dataclass(frozen=True)
class Place:
    """A group, and where it belongs."""

    group: int
    window: int
    mini: int


class Resampling:
    """`found` is called now and then; each place is said once."""

    def __init__(self, context: Context, steps: Sequence[StepRecord], trained: int) -> None:
        """`steps`: the ledger."""
        self._context, self._trained = context, trained
        self._most = context.spec.loss.resample or 0
        self._size = context.spec.algorithm.group_size
        lookahead = context.spec.algorithm.lookahead
        start = behind(steps, trained, lookahead)
        self._reader = context.bus.reader(context.topics.samples, start) if self._most else None
        self._rewards: dict[Place, dict[int, float]] = {}

    def found(self, trained: int) -> list[Place]:
        """Groups that are whole now and told nothing; `trained` iterations need no more."""
        if self._reader is None:
            return []
        if trained > self._trained:
            self._trained = trained
            self._rewards = {
                place: known for place, known in self._rewards.items() if place.window >= trained
            }
        result = []
        while records := self._reader.poll(0.0):
            for record in records:
                try:
                    sample = decode(record.value, Sample)
                except Unreadable:
                    continue  # the trainer reports it
                if (place := self._take(sample)) is not None:
                    result.append(place)
        return result

    def _take(self, sample: Sample) -> Place | None:
        """Its place, if it was the last of a group that told nothing."""
        if sample.run != self._context.run or sample.purpose != TRAIN or sample.window < self._trained:
            return None
        if fault(sample, self._context.spec) or round_of(sample.group) >= self._most:
            return None  # what is unfit the trainer reports, and it is made again
        place = Place(sample.group, sample.window, sample.mini)
        known = self._rewards.setdefault(place, {})
        if sample.index in known:
            return None
        known[sample.index] = math.nan if sample.reward_error else sample.reward
        if len(known) < self._size or not tells_nothing(known.values()):
            return None
        return place

    def close(self) -> None:
        """Let go of the reader."""
        if self._reader is not None:
            self._reader.close()
