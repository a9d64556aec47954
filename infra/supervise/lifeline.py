"""Ties the life of a process to that of its parent. Linux only, like the rest of StreamRL's supervision.

As a program, `lifeline.py PARENT COMMAND …`, it ties itself to its parent and becomes the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36

# Loaded once, before any fork: between fork and exec a child must not import or allocate much.
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` to this new child when the thread of `parent` that made it ends."""
    if _libc.prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG was refused")
    if os.getppid() != parent:  # the parent died before the call above: nobody would send the signal
        os._exit(1)


def adopt_orphans() -> None:
    """Make processes that this process's children leave behind its own children from now on."""
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(parent: int) -> Iterator[int]:
    """Yield the ids of a process's direct children that are not zombies."""
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in brackets may hold blanks and brackets: what we need is behind the last bracket.
            state, found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            if int(found) == parent and state != "Z":
                yield pid


def carrying(mark: str) -> Iterator[int]:
    """Yield the ids of processes with `mark` (NAME=value) in their environment, which children inherit."""
    wanted = mark.encode()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                yield pid


def _pids() -> Iterator[int]:
    me = os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != me:
            yield int(entry.name)


def main() -> None:
    """Become the command, which ends with the parent."""
    die_with_parent(int(sys.argv[1]))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and so it would be by the command
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
