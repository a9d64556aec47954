"""Reads a far store: objects in parts, several at once, and with retries after any error.

get ──► part 0 ┐               ┌──► spool/<name>/0     a part that is here is not fetched again,
        part 1 ├── at once ────┤                       not even by the next process
        part 2 ┘               └──► …
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra.files.private import make_private
from infra.stores.store import Missing, Store, StoreError
from infra.waiting import WaitedTooLong

LARGEST_PART, SMALLEST_PART = 2 << 20, 1 << 16
_AT_ONCE = 32  # parts: a single one would wait for round trips, and begins slowly
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_ASK_S = 0.5
_SPOOL_S = 24 * 3600.0  # so long the parts of an object stay when none comes any more


class Meter:
    """Measures bytes a second while anything is under way. Bytes of long ago count less."""

    _HALF_S = 20.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy, self._since = 0, 0.0
        self._bytes, self._seconds = 0.0, 0.0

    @contextlib.contextmanager
    def measured(self, size: int) -> Iterator[None]:
        """Count the time of the block, and `size` bytes if the block ends without an error."""
        with self._lock:
            self._tick()
            self._busy += 1
        came = 0
        try:
            yield
            came = size
        finally:
            with self._lock:
                self._tick()
                self._busy -= 1
                self._bytes += came

    def _tick(self) -> None:
        now = time.monotonic()
        if self._busy:
            self._seconds += now - self._since
        if self._seconds > self._HALF_S:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2
        self._since = now

    @property
    def rate(self) -> float | None:
        """Bytes a second; None while nothing has come."""
        with self._lock:
            return self._bytes / self._seconds if self._bytes and self._seconds else None


class OriginStore:
    """Reads a far store, for as long as that takes, unless nothing comes for `deadline_s`."""

    def __init__(
        self, store: Store, spool: Path, *, deadline_s: float, stop: threading.Event | None = None
    ) -> None:
        self.store, self.spool, self._deadline_s = store, spool, deadline_s
        self._stop = stop or threading.Event()
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="origin")
        self._meter = Meter()
        self._came_at = time.monotonic()
        self._waiting = 0
        self._lock = threading.Lock()
        self.crossed = 0  # bytes fetched
        self.trouble = ""  # why nothing comes, while nothing comes

    @property
    def rate(self) -> float | None:
        """Measured bytes a second; None while nothing has come."""
        return self._meter.rate

    def get(
        self, key: str, size: int | None = None, *, alive: Callable[[], None] = lambda: None,
        most: int | None = None,
    ) -> bytes:  # fmt: skip
        """Return an object, in parts if its size is given. Raise Missing if there is none.

        `alive` is called now and then meanwhile. `most`: maximum bytes of an object whose size is not known.
        """
        if size is None:
            parts = [self._pool.submit(self._again, lambda: self.store.get(key, most), key)]
        else:
            step = min(LARGEST_PART, max(SMALLEST_PART, -(-size // _AT_ONCE)))
            parts = [
                self._pool.submit(self._part, key, at, min(step, size - at)) for at in range(0, size, step)
            ]
        try:
            for part in parts:
                while not _done(part.exception):
                    alive()
            return b"".join(part.result() for part in parts)
        finally:
            for part in parts:
                part.cancel()

    def forget(self, key: str) -> None:
        """Delete the spooled parts of an object, which is stored elsewhere by now, or was wrong."""
        shutil.rmtree(self._spooled(key), ignore_errors=True)

    def sweep(self) -> None:
        """Delete spooled parts of objects that came from elsewhere, or are not wanted any more.

        A process that is at work after all has to fetch such parts again, which costs bytes alone.
        """
        before = time.time() - _SPOOL_S
        with contextlib.suppress(OSError):  # there is no spool, or another process sweeps it, too
            for folder in self.spool.iterdir():
                if folder.stat().st_mtime < before:
                    shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the threads, without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _spooled(self, key: str) -> Path:
        return self.spool / key.rpartition("/")[2]

    def _part(self, key: str, at: int, size: int) -> bytes:
        path = self._spooled(key) / str(at)
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if len(data) == size:
                return data
        with self._meter.measured(size):
            data = self._again(lambda: self.store.get_part(key, at, size), key)
        work = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk: the next process has to fetch this part again
            make_private(path.parent)
            work.write_bytes(data)
            work.replace(path)
        return data

    def _again(self, get: Callable[[], bytes], key: str) -> bytes:
        """Repeat `get` until it works. Raise WaitedTooLong if nothing comes to any thread for too long."""
        with self._wanted():
            for pause_s in self._pauses():
                try:
                    data = get()
                except Missing:
                    raise
                except StoreError as error:
                    self.trouble, waited = str(error), time.monotonic() - self._came_at
                    if waited > self._deadline_s:
                        raise WaitedTooLong(f"nothing came for {waited:.0f} s: {error}") from error
                    if self._stop.wait(pause_s):
                        raise StoreError(f"told to stop while {self.store.url}/{key} was fetched") from error
                    continue
                with self._lock:
                    self._came_at, self.trouble = time.monotonic(), ""
                    self.crossed += len(data)
                return data
        raise AssertionError("pauses never end")

    @contextlib.contextmanager
    def _wanted(self) -> Iterator[None]:
        """Count the caller as waiting during the block. The deadline's time passes only while some wait."""
        with self._lock:
            if not self._waiting:
                self._came_at = time.monotonic()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def _pauses(self) -> Iterator[float]:
        """Yield pauses in seconds, growing, and varied so that threads don't all try at the same moment."""
        for pause in _PAUSES_S:
            yield pause * random.uniform(0.7, 1.3)
        while True:
            yield _PAUSES_S[-1] * random.uniform(0.7, 1.3)


def _done(exception: Callable[[float], object]) -> bool:
    try:
        exception(_ASK_S)
    except TimeoutError:
        return False
    return True
