"""Files in memory that other processes map: once they are sealed, nobody can change or shorten them."""

from __future__ import annotations

import fcntl
import os

_ALL = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def new_memory(name: str) -> int:
    """Return the descriptor of an empty file in memory that can be sealed."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal(memory: int) -> None:
    """Let nobody change a file in memory any more. No process may have mapped it to write there."""
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _ALL)


def is_sealed(memory: int) -> bool:
    """Whether a descriptor is of a file in memory that nobody can change."""
    try:
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _ALL == _ALL
    except OSError:  # it is no file in memory
        return False
