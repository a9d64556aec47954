"""Tells a slow engine from one that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterable

from infra.supervise import children
from infra.waiting import Wait
from schemas.identity import SampleKey

_BUSY = 0.1  # of a processor core: the engine counts as working, since a long prompt delays the first token


class Drawing:
    """Counts the tokens that the engine draws, for finished and unfinished samples."""

    def __init__(self, deadline_s: float) -> None:
        self._wait = Wait("a token", unblocked_by="the engine process", deadline_s=deadline_s)
        self._had: dict[SampleKey, int] = {}
        self._cpu = time.monotonic(), children.cpu_s()
        self.tokens = 0

    def saw(self, held: Iterable[tuple[SampleKey, int]], *, running: int) -> None:
        """Take the number of tokens of each sample that is held.

        Raises WaitedTooLong if samples run and for too long there is no new token, none ends, and the engine
        is idle.
        """
        now = {key: count for key, count in held if count > 0}
        drawn = sum(max(0, count - self._had.get(key, 0)) for key, count in now.items())
        ended = self._had.keys() - now.keys()
        self._had, self.tokens = now, self.tokens + drawn
        if drawn or ended or not running or self._works():
            self._wait.progress()
        else:
            self._wait.check()

    def _works(self) -> bool:
        """Whether the engine's process computed since the last look. False within a second of that."""
        (at, before), now, used = self._cpu, time.monotonic(), children.cpu_s()
        if now - at < 1.0:
            return False
        self._cpu = now, used
        return used - before >= _BUSY * (now - at)
