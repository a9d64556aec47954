"""Sends a patch of weights to another machine once, for all ranks there.

frame PatchFollows(size) · the file's bytes · their digest (BLAKE3, 32 bytes)

TCP holds the sender back. The receiver gives a patch away only if its digest is right (`received_patch.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from infra.weights.folder import ModelFolder
from producers.engines.far_messages import PatchFollows
from producers.engines.received_patch import ReceivedPatch
from producers.engines.server_facts import DIGEST_BYTES

_PIECE = 1 << 20
_ELEMENT = 8  # bytes of the largest element that a patch may bring
_INDEX = 16 << 20  # bytes of the index of a patch, at most


def send_patch(file: Path, say: Callable[[PatchFollows], None], send: Callable[[bytes], None]) -> int:
    """Send a patch file, and return its size. `say` sends a frame, and `send` bytes behind it."""
    digest = blake3()
    with file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        say(PatchFollows(size))
        while piece := source.read(_PIECE):
            digest.update(piece)
            send(piece)
    send(digest.digest(DIGEST_BYTES))
    return size


def largest_patch(model: str) -> int:
    """Return how many bytes a patch for a model may have."""
    folder = ModelFolder(Path(model))
    return _INDEX + _ELEMENT * sum(map(math.prod, folder.shapes.values()))


def receive_patch(received: ReceivedPatch, size: int, source: BinaryIO) -> str:
    """Take so many bytes and their digest. Return the path by which other processes open the patch.

    Raises PatchRefused if it was cut off or damaged, and OSError if there is no memory for it.
    """
    left = size + DIGEST_BYTES
    while left and (piece := source.read(min(left, _PIECE))):
        received.add(piece)
        left -= len(piece)
    return received.finished()
