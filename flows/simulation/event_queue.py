"""Events to come, in order of time; those of one moment in the order in which they were planned."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from producers.engines.without_model import VirtualClock


class EventQueue:
    """Events on a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Plan an event."""
        self.at(self._clock.time + seconds, happens)

    def at(self, moment: float, happens: Callable[[], None]) -> None:
        """Plan an event for a moment."""
        heapq.heappush(self._events, (moment, next(self._numbers), happens))

    @property
    def next_at(self) -> float:
        """When the next event comes; infinity: none does."""
        return self._events[0][0] if self._events else float("inf")

    def happen(self) -> None:
        """Let all happen that is due by now, and what it plans for now."""
        while self._events and self._events[0][0] <= self._clock.time:
            heapq.heappop(self._events)[2]()
