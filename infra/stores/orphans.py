"""What killed writes leave in a store: temporary files, and uploads in parts that were never completed.

They are hidden from `list`, and take room for ever. Those go that are older than any write that is alive: a
file is written to until it is renamed, and an upload in parts takes no day.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from infra.stores.store import Store

FILE_GRACE_S = 3600.0  # since it was last written to
UPLOAD_GRACE_S = 24 * 3600.0  # since it was begun


@runtime_checkable
class Sweepable(Protocol):
    """A store in which killed writes leave something."""

    def sweep(self, prefix: str, *, file_grace_s: float, upload_grace_s: float) -> int:
        """Remove what killed writes left under a folder, if it is old enough; how many there were."""


def sweep(
    store: Store, prefix: str, *, file_grace_s: float = FILE_GRACE_S, upload_grace_s: float = UPLOAD_GRACE_S
) -> int:
    """Remove what killed writes left under a folder of a store; how many there were."""
    if not isinstance(store, Sweepable):
        return 0
    return store.sweep(prefix, file_grace_s=file_grace_s, upload_grace_s=upload_grace_s)
