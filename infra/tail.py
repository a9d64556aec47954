"""Follows a topic beside a busy loop: a thread waits for records, the loop only looks whether some came."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from infra.bus import Reader, Record

_Item = TypeVar("_Item")

_POLL_S = 2.0


class Inbox(Generic[_Item]):
    """Where a thread leaves what came for another one, or the error that ended it."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[_Item | BaseException] = queue.SimpleQueue()

    def put(self, item: _Item | BaseException) -> None:
        """Leave something."""
        self._came.put(item)

    def take(self) -> list[_Item]:
        """What came since the last call. Never waits; raises what went wrong in the thread."""
        items: list[_Item] = []
        while True:
            try:
                item = self._came.get_nowait()
            except queue.Empty:
                return items
            if isinstance(item, BaseException):
                raise item
            items.append(item)


class Tail(Generic[_Item]):
    """A thread that owns a patient reader from now on, and makes of each batch what the loop wants of it.

    `bell` is rung whenever something came: a loop that waits for several things waits for one bell.
    """

    def __init__(
        self, reader: Reader, work: Callable[[list[Record]], list[_Item]], bell: threading.Event
    ) -> None:
        self._reader, self._work, self._bell = reader, work, bell
        self._came = Inbox[_Item]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="tail")
        self._thread.start()

    def take(self) -> list[_Item]:
        """What came since the last call. Never waits; raises what went wrong in the thread."""
        return self._came.take()

    def close(self) -> None:
        """End the thread, which notices within seconds; nobody waits for that."""
        self._closed.set()

    def _follow(self) -> None:
        try:
            while not self._closed.is_set():
                records = self._reader.poll(_POLL_S)
                if not records or self._closed.is_set():
                    continue
                for item in self._work(records):
                    self._came.put(item)
                self._bell.set()
            self._reader.close()
        except Exception as error:  # whatever it is: the loop's own thread raises it
            self._came.put(error)
            self._bell.set()
