"""Sends a patch of weights to another machine once, for all ranks there.

frame PatchFollows(size) · the file's bytes · their digest (BLAKE3, 32 bytes)

TCP holds the sender back. The receiver writes into memory that has no name, and gives the patch away only if
its digest is right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from infra.errors import Explained
from infra.weights.folder import ModelFolder
from producers.engines.far_messages import PatchFollows

_PIECE = 1 << 20
_DIGEST = 32
_ELEMENT = 8  # bytes of the largest element that a patch may bring
_INDEX = 16 << 20  # bytes of the index of a patch, at most


class BadPatch(Explained):
    """A patch did not arrive as it was sent."""


def send_patch(file: Path, say: Callable[[PatchFollows], None], send: Callable[[bytes], None]) -> int:
    """Send a patch file, and return its size. `say` sends a frame, and `send` bytes behind it."""
    digest = blake3()
    with file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        say(PatchFollows(size))
        while piece := source.read(_PIECE):
            digest.update(piece)
            send(piece)
    send(digest.digest(_DIGEST))
    return size


def largest_patch(model: str) -> int:
    """Return how many bytes a patch for a model may have."""
    folder = ModelFolder(Path(model))
    return _INDEX + _ELEMENT * sum(map(math.prod, folder.shapes.values()))


class ReceivedPatch:
    """A patch that another machine sent, in this machine's memory."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("patch")

    @property
    def path(self) -> Path:
        """The path by which other processes open the file, until `close`."""
        return Path(f"/proc/{os.getpid()}/fd/{self._memory}")

    def receive(self, size: int, source: BinaryIO, most: int) -> None:
        """Take so many bytes and their digest.

        Raises BadPatch if it is larger than it may be, was cut off, or does not have that digest, and OSError
        if there is no memory for it.
        """
        if size > most:
            raise BadPatch(f"a patch of weights has {size} bytes, and the model allows {most}")
        digest, left = blake3(), size
        with open(self._memory, "wb", closefd=False) as file:
            while left:
                piece = source.read(min(left, _PIECE))
                if not piece:
                    raise BadPatch(f"the connection ended {left} bytes before the end of a patch of weights")
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
        if source.read(_DIGEST) != digest.digest(_DIGEST):
            raise BadPatch("a patch of weights has another digest than it was sent with")

    def close(self) -> None:
        """Let the memory go. Processes that have mapped the file keep what they mapped."""
        os.close(self._memory)
