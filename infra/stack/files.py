"""Files that are written whole or not at all, and locks between processes."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from infra.private import make_private
from infra.stack.stack_errors import StackBusy, StackError


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old text or the new one, even if the writer is killed."""
    make_private(path.parent)
    # mkstemp makes it 0600: a secret is never readable by others, not even for a moment.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path, *, what: str, deadline_s: float) -> Iterator[int]:
    """Hold an exclusive lock; the kernel releases it however the holder ends.

    Gives the lock's descriptor: a process that inherits it holds the lock too. Raise StackBusy at the
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
                    raise StackBusy(
                        f"{what} is locked by process {holder} for more than {deadline_s:.0f} s ({path})",
                        fix=f"wait for it, or end it: kill {holder}",
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


def _no_lock(path: Path, what: str, error: OSError) -> StackError:
    return StackError(
        f"{what} can't be locked: {path}: {error.strerror or error}",
        fix=f"make room in {path.parent}, or make it writable for you",
    )


def tail(path: Path, lines: int = 15) -> str:
    """Return the last lines of a log, for an error's text; empty if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
