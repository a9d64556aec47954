"""Shared memory of vLLM's ranks on a CPU, without names: so killed ranks leave none behind."""

from __future__ import annotations

import glob
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

_SHARED_MEMORY = Path("/dev/shm")


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
