"""Waiting for a condition with a deadline: what tests use in place of a sleep."""

import time
from collections.abc import Callable

_SLOWER = 5  # times that a machine of the tests may be slower than another


def wait_until(condition: Callable[[], object], *, what: str, deadline_s: float = 30.0) -> None:
    """`deadline_s`: for a machine that is fast and idle."""
    deadline_s *= _SLOWER
    until = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"waited {deadline_s:.0f} s in vain: {what}")
        time.sleep(0.02)
