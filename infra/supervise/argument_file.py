"""An argument of a child process, as a file in memory: Linux allows it 128 KiB, and a run file may be longer.

parent ── argument_file ──► a descriptor, which the child inherits; its number is the argument
child  ── read_argument ──► what was written there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def argument_file(content: bytes) -> Iterator[int]:
    """Give the descriptor of a file with `content`, and close it. A child that inherited it keeps it."""
    memory = os.memfd_create("argument")
    try:
        with os.fdopen(memory, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(memory, 0, os.SEEK_SET)
        yield memory
    finally:
        os.close(memory)


def read_argument(descriptor: str) -> bytes:
    """Return what the file has, and close it, so that no child of this process inherits it."""
    with os.fdopen(int(descriptor), "rb") as file:
        return file.read()
