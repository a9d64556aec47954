"""Nothing waits for ever: a wait says what it waits for, who would unblock it, and ends at a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from infra.errors import Explained

_GAP_SHARE = 0.25  # of the deadline: so much counts at most between two looks


class WaitedTooLong(Explained):
    """A deadline passed without progress."""


class Signs(Protocol):
    """Signs of life anywhere in a run: while something moves, no wait is over."""

    def still_s(self) -> float:
        """For how long nothing has moved, as far as is known; infinite if nothing is known."""

    def waits(self) -> str:
        """The processes with what they wait for, for people; empty if it is not known."""

    def close(self) -> None:
        """Let go of what tells it."""


class NoSigns:
    """Nothing is known: each wait is by itself."""

    def still_s(self) -> float:
        return math.inf

    def waits(self) -> str:
        return ""

    def close(self) -> None: ...


class Wait:
    """One wait: `progress()` when something came, `check()` when nothing did.

    Only time in which it was looked at counts: a machine that slept, or a process that was stopped, has not
    waited. With `signs` it is over only when nothing moves anywhere: late is not dead.
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
        """Something came: the deadline starts anew."""
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
    """Poll a condition until it holds."""
    wait = Wait(what, unblocked_by=unblocked_by, deadline_s=deadline_s)
    while not true():
        wait.check()
        time.sleep(every_s)
