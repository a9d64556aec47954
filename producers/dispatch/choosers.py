"""Where a choice of a plan is made: at once, or in a thread beside the dispatcher, which goes on dealing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from infra.background import Background

Result = TypeVar("Result")


class Chooser(Protocol[Result]):
    """Makes one choice at a time. The work uses nothing that the dispatcher changes."""

    @property
    def wakes_at(self) -> float:
        """When the result is there, if that is known."""

    def begin(self, work: Callable[[], Result], now: float) -> None:
        """Begin some work. The one before is done, and its result was taken."""

    def take(self, now: float) -> tuple[Result, float] | None:
        """Return the result, once, and how many seconds it took; None: it is not there yet."""

    def rests(self, now: float) -> bool:
        """Whether the last work took so long that the next one should wait."""


class AtOnce(Generic[Result]):
    """Does the work when it is begun."""

    wakes_at = float("inf")

    def __init__(self) -> None:
        self._found: tuple[Result, float] | None = None

    def begin(self, work: Callable[[], Result], now: float) -> None:
        began = time.monotonic()
        result = work()
        self._found = result, time.monotonic() - began

    def take(self, now: float) -> tuple[Result, float] | None:
        found, self._found = self._found, None
        return found

    def rests(self, now: float) -> bool:
        return False


class InThread(Generic[Result]):
    """Does the work in a thread, and rests four times as long as it took."""

    wakes_at = float("inf")  # nobody knows

    def __init__(self) -> None:
        self._thread: Background | None = None
        self._found: list[tuple[Result, float]] = []
        self._rests_until = float("-inf")

    def begin(self, work: Callable[[], Result], now: float) -> None:
        found: list[tuple[Result, float]] = []

        def run() -> None:
            began = time.monotonic()
            result = work()
            found.append((result, time.monotonic() - began))

        self._found = found
        self._thread = Background(run, "choose")
        self._thread.start()

    def take(self, now: float) -> tuple[Result, float] | None:
        if self._thread is None:
            return None
        self._thread.check()
        if not self._found:
            return None
        self._thread = None
        self._rests_until = now + _REST * self._found[0][1]
        return self._found.pop()

    def rests(self, now: float) -> bool:
        return now < self._rests_until


_REST = 4.0  # a stream of new jobs keeps a fifth of a core busy with choosing, and no more
