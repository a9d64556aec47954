"""Removes what killed writes leave in a store: temporary files, and uploads in parts that never ended.

`list` hides them, and without this they would take room for ever. Whatever is older than any write that may
be alive is removed: a file is written to until it is renamed, and an upload in parts takes less than a day.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from infra.stores.store import Store

FILE_GRACE_S = 3600.0  # since the file was last written to
UPLOAD_GRACE_S = 24 * 3600.0  # since the upload was begun


@runtime_checkable
class Sweepable(Protocol):
    """A store in which killed writes leave something behind."""

    def sweep(self, prefix: str, *, file_grace_s: float, upload_grace_s: float) -> int:
        """Remove what killed writes left under a folder, if it is old enough. Return how many there were."""


def sweep(
    store: Store, prefix: str, *, file_grace_s: float = FILE_GRACE_S, upload_grace_s: float = UPLOAD_GRACE_S
) -> int:
    """Remove what killed writes left under a store's folder, if old enough. Return how many there were."""
    if not isinstance(store, Sweepable):
        return 0
    return store.sweep(prefix, file_grace_s=file_grace_s, upload_grace_s=upload_grace_s)
