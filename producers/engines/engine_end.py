"""Says why an engine process is about to be ended, though a call of its own thread never returns.

Rank 0 of several may wait within a sum, for ever, for a rank that has failed: while the engine is made, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from producers.engines.engine import EngineError


def _to_log(error: EngineError) -> None:
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()


_tell: Callable[[EngineError], None] = _to_log


def tell_by(tell: Callable[[EngineError], None]) -> None:
    """Have `tell` called, in any thread, before this process is ended; without it, the log has the error."""
    global _tell
    _tell = tell


def say(error: EngineError) -> None:
    """Say why this process is about to be ended."""
    _tell(error)
