"""One holder for one thing: a lock that the kernel lets go of when all who share it are gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from flows.request import RunFailed


@contextlib.contextmanager
def held(path: Path, what: str, *, patience_s: float) -> Iterator[int]:
    """Hold the lock; gives its descriptor, so that a guard can hold it until its workers are gone too.

    A flow that was killed lets go only when its guard has ended the workers: `patience_s` covers that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    holder = os.pread(handle, 32, 0).decode().strip() or "another process"
                    raise RunFailed(
                        f"{what} is being run by process {holder}: wait for it, or end it"
                    ) from None
                time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield handle
    finally:
        os.close(handle)
