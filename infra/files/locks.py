"""Locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from infra.errors import Explained
from infra.files.private import make_private


class LockError(Explained):
    """A file can't be locked."""


class LockHeld(LockError):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, *, what: str, deadline_s: float) -> Iterator[int]:
    """Hold an exclusive lock; the kernel releases it however the holder ends.

    Gives the lock's descriptor: a process that inherits it holds the lock too. Raise LockHeld at the
    deadline.

    Waits for: the process whose pid stands in the file. Unblocked by: its end.
    """
    try:
        make_private(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _no_lock(path, what, error) from error
    try:
        until = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    holder = os.pread(handle, 32, 0).decode().strip() or "unknown"
                    raise LockHeld(
                        f"{what} is locked by process {holder} for more than {deadline_s:.0f} s ({path})"
                        f"\n  → wait for it, or end it: kill {holder}"
                    ) from None
                time.sleep(0.05)
            except OSError as error:  # a file system without locks
                raise _no_lock(path, what, error) from error
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        except OSError as error:  # a full disk
            raise _no_lock(path, what, error) from error
        yield handle
    finally:
        os.close(handle)


class SharedLock:
    """A lock that any number of holders share, or that one holder has alone. It never waits.

    The kernel releases it however its holders end. A process that inherits `descriptor` holds what this one
    holds.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        """Open the file, and create it if it is missing. `what`: the locked thing, for an error."""
        self._path, self._what = path, what
        try:
            make_private(path.parent)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_lock(path, what, error) from error

    def take(self, *, alone: bool) -> bool:
        """Take the lock, and return whether it could be had at once."""
        try:
            fcntl.flock(self.descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # a file system without locks
            raise _no_lock(self._path, self._what, error) from error
        return True

    def give(self) -> None:
        """Let go of the lock."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock, and close the file."""
        os.close(self.descriptor)


def _no_lock(path: Path, what: str, error: OSError) -> LockError:
    return LockError(
        f"{what} can't be locked: {path}: {error.strerror or error}"
        f"\n  → make room in {path.parent}, or make it writable for you"
    )
