"""Sends reports at intervals, from a thread of its own. A report that fails is logged and ends nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable


class TimedReports:
    """Calls `send` at once, then every `every_s()` seconds, and also as soon as `soon` is called."""

    def __init__(self, send: Callable[[], None], every_s: Callable[[], float], log: logging.Logger) -> None:
        self._send, self._every_s, self._log = send, every_s, log
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="reports")

    def open(self) -> TimedReports:
        """Start the thread. Return itself."""
        self._thread.start()
        return self

    def soon(self) -> None:
        """Have a report sent at once, because there is news."""
        self._news.set()

    def close(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        self._news.set()
        self._thread.join()

    def _work(self) -> None:
        said = ""
        while not self._ended.is_set():
            try:
                self._send()
                said = ""
            except Exception as error:  # whatever it is, weights come nevertheless
                if said != (said := f"{type(error).__name__}: {error}"):
                    self._log.warning("a report could not be sent, and the next one will be tried: %s", said)
            self._news.wait(self._every_s())
            self._news.clear()
