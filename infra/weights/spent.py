"""Counts CPU seconds that this process spends on weights: hashes, copies, coding, transfer. Heartbeats tell
them.

Threads do that work beside generation and training, inside their processes; without the count, nobody could
tell what weights cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_total = 0.0
_within = threading.local()  # of each thread: whether a caller counts already


@contextmanager
def counted() -> Iterator[None]:
    """Count this thread's CPU time in a `with` block or a decorated function; nested ones count once."""
    global _total
    if getattr(_within, "counted", False):
        yield
        return
    before, _within.counted = time.thread_time(), True
    try:
        yield
    finally:
        _within.counted = False
        with _lock:
            _total += time.thread_time() - before


def seconds() -> float:
    """Return the CPU seconds that were counted since the process began."""
    return _total
