"""Shared memory, sockets and files by which vLLM's processes meet, without names.

Once all have opened them nobody needs the names any more, and what has none is gone with the last process:
so killed processes leave nothing behind.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # the name that vLLM gives one

_met_by: list[Path] = []  # files by which this process has met other ranks


def without_names(plain: Callable[[Any], int]) -> Callable[[Any], int]:
    """Remove the names of a group's shared memory as soon as all its ranks have mapped it."""

    @wraps(plain)
    def init(self: Any) -> int:
        handle = plain(self)
        for file in _SHARED_MEMORY.glob(f"{glob.escape(self.group_name)}*"):
            with suppress(FileNotFoundError):  # another rank was faster
                file.unlink()
        return handle

    return init


def remove_socket_names() -> None:
    """Remove names of vLLM's sockets that this process and its children have, or had. Connections stay."""
    folder = Path(os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir()))
    own, paths = psutil.Process(), set[Path]()
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            paths |= {Path(str(one.laddr)) for one in process.net_connections("unix")}
    for path in (one for one in folder.iterdir() if _SOCKET.fullmatch(one.name)):
        with suppress(FileNotFoundError):
            if path in paths or _is_left(path, own.create_time()):
                path.unlink()


def _is_left(path: Path, since: float) -> bool:
    """Whether a socket's name was made since then, by this user, and nobody listens there any more."""
    about = path.stat()
    if not stat.S_ISSOCK(about.st_mode) or about.st_uid != os.getuid() or about.st_mtime < since:
        return False
    with socket.socket(socket.AF_UNIX) as trying:
        trying.setblocking(False)
        return trying.connect_ex(str(path)) == errno.ECONNREFUSED


def meeting_without_name(plain: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
    """Let ranks meet by a file that works on when it has no name any more. `plain`: torch's FileStore."""

    @wraps(plain, updated=())
    def meet(path: str, ranks: int) -> Any:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open for as long as this process
        _met_by.append(Path(path))
        return plain(f"/proc/self/fd/{file}", ranks)

    return meet


def remove_meeting_names() -> None:
    """Remove the names of the files by which this process met other ranks. Call it when all have met."""
    while _met_by:
        _met_by.pop().unlink(missing_ok=True)
