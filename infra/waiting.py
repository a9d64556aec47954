"""Nothing waits for ever: a wait says what it waits for, who would unblock it, and ends at a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.errors import Explained


class WaitedTooLong(Explained):
    """A deadline passed without progress."""


class Wait:
    """One wait: `progress()` when something came, `check()` when nothing did."""

    def __init__(self, what: str, *, unblocked_by: str, deadline_s: float) -> None:
        self.what = what
        self.unblocked_by = unblocked_by
        self.deadline_s = deadline_s
        self._since = time.monotonic()

    def progress(self) -> None:
        """Something came: the deadline starts anew."""
        self._since = time.monotonic()

    def check(self) -> None:
        """Raise WaitedTooLong if the deadline has passed."""
        waited = time.monotonic() - self._since
        if waited > self.deadline_s:
            raise WaitedTooLong(
                f"waited {waited:.0f} s for {self.what} without progress; "
                f"{self.unblocked_by} would unblock it"
            )


def wait_until(
    true: Callable[[], object], what: str, *, unblocked_by: str, deadline_s: float, every_s: float = 0.02
) -> None:
    """Poll a condition until it holds."""
    wait = Wait(what, unblocked_by=unblocked_by, deadline_s=deadline_s)
    while not true():
        wait.check()
        time.sleep(every_s)
