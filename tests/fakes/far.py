"""A store that is slow, fails when it is told to, and counts what is read of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable

from infra.stores.file_store import FileStore
from infra.stores.store import StoreError


class FarStore(FileStore):
    """A folder far away."""

    def __init__(self, url: str, *, seconds: float = 0.0) -> None:
        super().__init__(url)
        self._seconds, self._reads = seconds, itertools.count()
        self._fails: Callable[[int], bool] = lambda read: False
        self._lock = threading.Lock()
        self.missing = ""  # what can't be read
        self.chunks_read: Counter[tuple[str, int]] = Counter()  # which part of which chunk how often
        self.bytes_of_chunks = 0

    def fail(self, when: Callable[[int], bool]) -> None:
        """From now on the reads of these numbers fail."""
        self._reads, self._fails = itertools.count(), when

    def get(self, key: str, size: int | None = None) -> bytes:
        self._go(key)
        return self._counted(key, 0, super().get(key, size))

    def get_part(self, key: str, at: int, size: int) -> bytes:
        self._go(key)
        return self._counted(key, at, super().get_part(key, at, size))

    def _go(self, key: str) -> None:
        time.sleep(self._seconds)  # the way there and back
        assert key != self.missing, "it was asked for"
        if "/chunks/" in key and self._fails(next(self._reads)):
            raise StoreError(f"{self.url}/{key} can't be read: the link is cut")

    def _counted(self, key: str, at: int, data: bytes) -> bytes:
        if "/chunks/" in key:
            with self._lock:
                self.chunks_read[key, at] += 1
                self.bytes_of_chunks += len(data)
        return data
