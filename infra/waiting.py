"""Waits that end at a deadline, and that say what they wait for and who would unblock them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from infra.errors import Explained

_GAP_SHARE = 0.25  # of the deadline: at most so much counts between two checks


class WaitedTooLong(Explained):
    """A deadline passed without progress."""


class Signs(Protocol):
    """Signs of life anywhere in a run: while something moves, no wait ends by its deadline."""

    def still_s(self) -> float:
        """Return for how many seconds nothing has moved, as far as is known; infinite if nothing is known."""

    def waits(self) -> str:
        """Return the processes with what they wait for, as text; empty if that is not known."""

    def close(self) -> None:
        """Stop listening for signs."""


class NoSigns:
    """Knows of no signs of life: each wait counts its own time alone."""

    def still_s(self) -> float:
        return math.inf

    def waits(self) -> str:
        return ""

    def close(self) -> None: ...


class Wait:
    """One wait. Call `progress()` when something came, and `check()` when nothing did.

    Only time between frequent calls counts: a machine that slept, or a process that was stopped, has not
    waited. With `signs` the wait ends only when nothing moves anywhere in the run: late is not dead.
    """

    def __init__(
        self, what: str, *, unblocked_by: str, deadline_s: float, signs: Signs | None = None
    ) -> None:
        self.what = what
        self.unblocked_by = unblocked_by
        self.deadline_s = deadline_s
        self._signs: Signs = signs or NoSigns()
        self._waited, self._looked_at = 0.0, time.monotonic()

    def progress(self) -> None:
        """Start the deadline anew, because something came."""
        self._waited, self._looked_at = 0.0, time.monotonic()

    def check(self) -> None:
        """Raise WaitedTooLong if the deadline has passed."""
        now = time.monotonic()
        self._waited += min(now - self._looked_at, self.deadline_s * _GAP_SHARE)
        self._looked_at = now
        self._waited = min(self._waited, self._signs.still_s())
        if self._waited > self.deadline_s:
            others = self._signs.waits()
            nowhere = f". Nothing moves anywhere: {others}" if others else ""
            raise WaitedTooLong(
                f"waited {self._waited:.0f} s for {self.what} without progress; "
                f"{self.unblocked_by} would unblock it{nowhere}"
            )


def wait_until(
    true: Callable[[], object], what: str, *, unblocked_by: str, deadline_s: float, every_s: float = 0.02
) -> None:
    """Poll a condition until it holds. Raise WaitedTooLong at the deadline."""
    wait = Wait(what, unblocked_by=unblocked_by, deadline_s=deadline_s)
    while not true():
        wait.check()
        time.sleep(every_s)
