"""A patch of weights that comes to another machine or process: in memory, checked, and then never changed.

bytes of the patch ┊ hash of them (blake3)      as they are sent
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from blake3 import blake3

from infra.errors import Explained
from infra.files.sealed_memory import new_memory, seal
from producers.engines.server_facts import DIGEST_BYTES


class PatchRefused(Explained):
    """There is no patch for this model in what came; the message says why."""


class ReceivedPatch:
    """A file in memory that is filled once. Leave its context when all processes have opened it."""

    def __init__(self, length: int, most: int) -> None:
        """`length`: bytes that are to come, with those of the hash. `most`: bytes that a patch may have."""
        self._left = length - DIGEST_BYTES
        if not 0 < self._left <= most:
            raise PatchRefused(f"a patch of {self._left} bytes: the model allows from 1 to {most}")
        self._hash, self._digest, self._memory = blake3(), b"", -1

    def __enter__(self) -> ReceivedPatch:
        self._memory = new_memory("received")
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self._memory)

    def add(self, data: bytes) -> None:
        """Take the next bytes. Raises PatchRefused if there are more than were said."""
        view = memoryview(data)
        body, rest = view[: self._left], view[self._left :]
        self._left -= len(body)
        self._hash.update(body)
        while body:
            body = body[os.write(self._memory, body) :]
        self._digest += bytes(rest)
        if len(self._digest) > DIGEST_BYTES:
            raise PatchRefused("more bytes came than were said")

    def finished(self) -> str:
        """Return the path by which other processes open the patch. Raises PatchRefused if it is damaged."""
        if self._left or len(self._digest) < DIGEST_BYTES:
            raise PatchRefused(f"the patch broke off: {self._left} bytes of it are missing")
        if not secrets.compare_digest(self._hash.digest(), self._digest):
            raise PatchRefused("the patch was damaged on its way: its bytes have another hash")
        seal(self._memory)
        return f"/proc/{os.getpid()}/fd/{self._memory}"
