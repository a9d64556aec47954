"""A thread beside its owner's, whose error the owner raises."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs `work` in a daemon thread. An error that ends it waits until the owner calls `check`."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        """`name` is the thread's, for logs and profilers."""
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, at most for `timeout_s` seconds. Its owner has told it to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # whatever it is: the owner's own thread raises it
            self._error = error
