"""Objects of the store, named by the hash of their bytes, so that wrong bytes are always noticed.

<prefix>/chunks/<blake3 of its bytes>
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from infra.stores.store import Exists, Store
from infra.weights.codec.chunks import in_threads
from infra.weights.garbage import ByteProgress
from infra.weights.manifest import Chunk
from infra.weights.weights_error import WeightsError

UNDER_WAY = 4  # objects that are put or fetched at once


def chunk_of(data: bytes) -> Chunk:
    """Return name and size of an object with these bytes."""
    return Chunk(hash=blake3(data).hexdigest(), size=len(data))


class Objects:
    """The objects of one series of versions."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def key(self, chunk: Chunk) -> str:
        """Return the key of an object."""
        return f"{self._prefix}/chunks/{chunk.hash}"

    def put(self, data: Iterable[bytes], progress: ByteProgress) -> tuple[Chunk, ...]:
        """Put objects, and return their names. Raises WeightsError if one was collected meanwhile."""
        chunks, known, sent = [], [], 0
        for chunk, new in in_threads(self._put, data, UNDER_WAY):
            chunks.append(chunk)
            known += [] if new else [chunk]
            sent += chunk.size
            progress(sent, 0)
        for chunk in known:  # it was there, but may have been garbage that was just removed
            if not self._store.exists(self.key(chunk)):
                raise WeightsError(
                    f"{self._url(chunk)} was collected as garbage while it was published: publish the "
                    "version again"
                )
        return tuple(chunks)

    def _put(self, data: bytes) -> tuple[Chunk, bool]:
        """Put one object. Returns its name, and whether it is new."""
        chunk = chunk_of(data)
        try:
            self._store.put_new(self.key(chunk), data)
        except Exists:  # the same name means the same bytes
            return chunk, False
        return chunk, True

    def get(self, chunk: Chunk) -> bytes:
        """Return an object's bytes. Raises WeightsError if they are not those that its name says."""
        data = self._store.get(self.key(chunk), chunk.size)
        if blake3(data).hexdigest() != chunk.hash:
            raise WeightsError(f"{self._url(chunk)} is damaged: it has other bytes than its name says")
        return data

    def _url(self, chunk: Chunk) -> str:
        return f"{self._store.url}/{self.key(chunk)}"
