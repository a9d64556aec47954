"""Remembers the Python objects that arrow's threads hold, so that a process ends after they let go of them.

A thread of arrow's that lets go of the last reference while the interpreter ends can't take its lock
any more: the thread is unwound through code that forbids it, and the process aborts.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any, TypeVar

_Object = TypeVar("_Object")
_PAUSE_S = 0.001
_LET_GO_S = 10.0
_log = logging.getLogger(__name__)


class LentToArrow:
    """The Python objects that the datasets of one query hold."""

    def __init__(self) -> None:
        self._lent: list[weakref.ref[Any]] = []

    def lend(self, one: _Object) -> _Object:
        """Return an object, and remember that arrow is given it."""
        self._lent.append(weakref.ref(one))
        return one

    def wait(self, deadline_s: float = _LET_GO_S) -> bool:
        """Wait until all are let go of; False: some are still held. Call it when nobody else holds them."""
        until = time.monotonic() + deadline_s
        while held := sum(one() is not None for one in self._lent):
            if time.monotonic() > until:
                _log.warning("arrow still holds %d objects of a query %g s after its end", held, deadline_s)
                return False
            time.sleep(_PAUSE_S)
        return True
