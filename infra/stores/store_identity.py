"""Which store it is: an id drawn when the first run in it is made, and checked by every process of a run.

streamrl-store.json     {"id": …}: put once, never changed

A disk that was unmounted, or a bucket that was emptied, looks like a new store: everything would be written
again into nothing. So a store that has an id is pinned: before a FileStore writes it looks whether that file
is still there; an FsspecStore looks before it commits something, once a minute.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from typing import Protocol, runtime_checkable

from infra.stores.store import IDENTITY, Exists, Missing, Store, another_store, id_in


@runtime_checkable
class Pinnable(Protocol):
    """A store that goes on looking whether it is the one that it was."""

    def pin(self, identity: str) -> None:
        """Refuse from now on to write into another one; raises StoreError if it is another one already."""


@runtime_checkable
class Creatable(Protocol):
    """A store that has a place which can be made."""

    def create(self) -> None:
        """Make the place, if it is not there."""


def identity_of(store: Store) -> str:
    """The id of a store; empty if it has none."""
    try:
        return id_in(store.get(IDENTITY), f"{store.url}/{IDENTITY}")
    except Missing:
        return ""


def identify(store: Store) -> str:
    """The id of a store, which gets one here if it has none: only where a run is made. Pins it."""
    if isinstance(store, Creatable):
        store.create()
    found = identity_of(store)
    if not found:
        said = json.dumps({"id": uuid.uuid4().hex, "created_at": time.time()}).encode()
        with contextlib.suppress(Exists):  # another run was made at the same moment
            store.put_new(IDENTITY, said)
        found = identity_of(store)
    if isinstance(store, Pinnable):
        store.pin(found)
    return found


def check_identity(store: Store, identity: str) -> None:
    """Raise StoreError unless it is the store of that id, and pin it. Without an id nothing is known."""
    if not identity:
        return
    found = identity_of(store)
    if found != identity:
        raise another_store(store.url, f"its id is {found}, not {identity}" if found else "")
    if isinstance(store, Pinnable):
        store.pin(identity)
