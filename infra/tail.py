"""Follows a topic for a busy loop: a thread waits for records, and the loop takes what has come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from infra.bus import Reader, Record

_Item = TypeVar("_Item")

_POLL_S = 2.0


class Inbox(Generic[_Item]):
    """A queue from a thread to a loop, for items or for the error that ended the thread."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[_Item | BaseException] = queue.SimpleQueue()

    def put(self, item: _Item | BaseException) -> None:
        """Add an item or an error."""
        self._came.put(item)

    def take(self) -> list[_Item]:
        """Return the items since the last call, without waiting. Raise the thread's error, if any."""
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
    """A thread that reads a topic and turns each batch of records into items for the loop.

    It owns `reader`, a patient one, from now on. `work` makes the items. `bell` is set whenever items came,
    so that a loop can wait for several tails with one event.
    """

    def __init__(
        self, reader: Reader, work: Callable[[list[Record]], list[_Item]], bell: threading.Event
    ) -> None:
        self._reader, self._work, self._bell = reader, work, bell
        self._came = Inbox[_Item]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="tail")

    def open(self) -> Tail[_Item]:
        """Start the thread. Return itself."""
        self._thread.start()
        return self

    def take(self) -> list[_Item]:
        """Return the items since the last call, without waiting. Raise the thread's error, if any."""
        return self._came.take()

    def close(self) -> None:
        """Tell the thread to end, which takes it seconds, and don't wait for it."""
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
