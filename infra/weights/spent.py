"""CPU seconds that this process has spent on weights: hashes, copies, coding, transfer. Its heart says them.

Threads do that work beside generation and training, inside their processes; without this, nobody could tell
what weights cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_total = 0.0
_within = threading.local()  # of each thread: whether somebody counts already


@contextmanager
def counted() -> Iterator[None]:
    """Count what this thread does meanwhile, once."""
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
    """So many, since the process began."""
    return _total
