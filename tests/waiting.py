"""Waiting for a condition with a deadline: what tests use in place of a sleep."""

import time
from collections.abc import Callable

_SLOWER = 5  # times that a machine of the tests may be slower than another
_SOON_S, _LATE_S = 0.02, 0.1  # pauses at first and in a long wait: looks take time from what is waited for


def wait_until(condition: Callable[[], object], *, what: str, deadline_s: float = 30.0) -> None:
    """`deadline_s`: for a machine that is fast and idle."""
    deadline_s *= _SLOWER
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        if waited > deadline_s:
            raise AssertionError(f"waited {deadline_s:.0f} s in vain: {what}")
        time.sleep(min(_LATE_S, max(_SOON_S, waited / 20)))
