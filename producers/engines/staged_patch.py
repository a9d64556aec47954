"""A patch of weights for a server of vLLM, in the memory of another process on its machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from infra.files.sealed_memory import is_sealed
from producers.engines.engine import EngineError
from producers.engines.server_facts import FILE_AWAY

_IN_MEMORY = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class StagedPatch:
    """A patch that other ranks open as well: all map the same memory."""

    def __init__(self, file: str, limit: int) -> None:
        """Open the file. Raises EngineError if it is none in memory, can still change, or is too large."""
        if not _IN_MEMORY.fullmatch(file):
            raise EngineError(f"{file[:200]} is no file in a process's memory")
        try:
            if not str(Path(file).readlink()).startswith("/memfd:"):
                raise EngineError(f"{file} is no file in memory")
            self._memory = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(f"{FILE_AWAY}: {error}") from None
        size = os.fstat(self._memory).st_size
        if not is_sealed(self._memory):
            problem = f"{file} can still be changed"
        elif size > limit:
            problem = f"a patch of {size} bytes is larger than the model allows"
        else:
            return
        self.close()
        raise EngineError(problem)

    @property
    def path(self) -> Path:
        """The path by which this process opens the file."""
        return Path(f"/proc/self/fd/{self._memory}")

    def close(self) -> None:
        """Give the memory back, once the patch that was read of it is gone, too."""
        os.close(self._memory)
