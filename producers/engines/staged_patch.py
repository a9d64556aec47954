"""A patch of weights on its way into a server of vLLM: in pieces, or in the memory of another process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from producers.engines.engine import EngineError
from producers.engines.server_facts import FILE_AWAY, PATCH_PIECE

_IN_MEMORY = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class StagedPatch:
    """A patch of which pieces come, in a file in memory that has no name."""

    def __init__(self, limit: int) -> None:
        self._memory, self._limit = os.memfd_create("staged"), limit
        self.size = 0

    @property
    def path(self) -> Path:
        """The path by which this process opens the file."""
        return Path(f"/proc/self/fd/{self._memory}")

    def add(self, at: int, data: bytes) -> None:
        """Append a piece. Raises EngineError if it is not the next one, or makes the patch too large."""
        if at != self.size:
            raise EngineError(f"a piece of a patch begins at byte {at}; byte {self.size} is next")
        if len(data) > PATCH_PIECE or self.size + len(data) > self._limit:
            raise EngineError(f"a patch of more than {self._limit} bytes is larger than the model allows")
        view = memoryview(data)
        while view:
            view = view[os.write(self._memory, view) :]
        self.size += len(data)

    def take(self, file: str) -> None:
        """Take a file in another process's memory as the whole patch."""
        if not _IN_MEMORY.fullmatch(file):
            raise EngineError(f"{file[:200]} is no file in a process's memory")
        try:
            if not str(Path(file).readlink()).startswith("/memfd:"):
                raise EngineError(f"{file} is no file in memory")
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(f"{FILE_AWAY}: {error}") from None
        self.close()
        self._memory, self.size = opened, os.fstat(opened).st_size
        if self.size > self._limit:
            raise EngineError(f"a patch of {self.size} bytes is larger than the model allows")

    def close(self) -> None:
        """Give the memory back."""
        os.close(self._memory)
