"""Counts what a process's time goes to: seconds by cause, without a gap.

At any moment one cause is in force, and all time counts for it until the next one. A change costs a few
additions, however often it happens, and the number of causes is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from schemas.messages import MOST_CAUSES

OTHER = "other"


class Causes:
    """The seconds of this process by cause. Their sum is the age of this object."""

    def __init__(self, cause: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._cause, self._since = clock, cause, clock()
        self._seconds: dict[str, float] = {cause: 0.0}
        self._lock = threading.Lock()  # heartbeats are sent by another thread

    def begin(self, cause: str) -> None:
        """Count the time from now on for this cause."""
        if cause != self._cause:
            with self._lock:
                self._settle()
                self._cause = self._known(cause)

    def recount(self, cause: str, seconds: float) -> None:
        """Count the last `seconds` for this cause, in place of the one that is in force."""
        with self._lock:
            self._settle()
            taken = min(max(0.0, seconds), self._seconds[self._cause])
            self._seconds[self._cause] -= taken
            self._seconds[self._known(cause)] += taken

    def seconds(self) -> dict[str, float]:
        """Return the seconds by cause up to now."""
        with self._lock:
            self._settle()
            return dict(self._seconds)

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._cause] += now - self._since
        self._since = now

    def _known(self, cause: str) -> str:
        if cause not in self._seconds and len(self._seconds) >= MOST_CAUSES - 1:
            cause = OTHER
        self._seconds.setdefault(cause, 0.0)
        return cause
