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
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        except OSError as error:  # a full disk
            raise _no_lock(path, what, error) from error
        yield handle
    finally:
        os.close(handle)


def _no_lock(path: Path, what: str, error: OSError) -> LockError:
    return LockError(
        f"{what} can't be locked: {path}: {error.strerror or error}"
        f"\n  → make room in {path.parent}, or make it writable for you"
    )
