"""Objects that hold what changes, or all that there is: named by what is in them, so that none is ever wrong.

<prefix>/chunks/<blake3 of it>
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from infra.stores.store import Exists, Store
from infra.weights.codec.chunks import in_threads
from infra.weights.garbage import ByteProgress
from infra.weights.manifest import Chunk
from infra.weights.weights_error import WeightsError

UNDER_WAY = 4  # that are put or fetched at once


def chunk_of(data: bytes) -> Chunk:
    """How an object with these bytes is called."""
    return Chunk(hash=blake3(data).hexdigest(), size=len(data))


class Objects:
    """Those of one series of versions."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def key(self, chunk: Chunk) -> str:
        """Where one lies."""
        return f"{self._prefix}/chunks/{chunk.hash}"

    def put(self, data: Iterable[bytes], progress: ByteProgress) -> tuple[Chunk, ...]:
        """Put some, of which none is collected before a version names it."""
        chunks, known, sent = [], [], 0
        for chunk, new in in_threads(self._put, data, UNDER_WAY):
            chunks.append(chunk)
            known += [] if new else [chunk]
            sent += chunk.size
            progress(sent, 0)
        for chunk in known:  # it may have been garbage, and on its way out
            if not self._store.exists(self.key(chunk)):
                raise WeightsError(f"{self._url(chunk)} was collected while it was published: do so again")
        return tuple(chunks)

    def _put(self, data: bytes) -> tuple[Chunk, bool]:
        """One, and whether it was not there."""
        chunk = chunk_of(data)
        try:
            self._store.put_new(self.key(chunk), data)
        except Exists:  # of the same name: of the same bytes
            return chunk, False
        return chunk, True

    def get(self, chunk: Chunk) -> bytes:
        """One's bytes. Raises unless it is there, and whole."""
        data = self._store.get(self.key(chunk), chunk.size)
        if blake3(data).hexdigest() != chunk.hash:
            raise WeightsError(f"{self._url(chunk)} is damaged: it has other bytes than its name says")
        return data

    def _url(self, chunk: Chunk) -> str:
        return f"{self._store.url}/{self.key(chunk)}"
