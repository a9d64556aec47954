"""The id of a store: drawn when the first run in it is made, and checked by every process of a run.

streamrl-store.json     {"id": …}: put once, never changed

A disk that was unmounted, or a bucket that was emptied, looks like a new store, to which everything would be
written again. So a store that has an id is pinned: a FileStore looks before each write whether the file with
the id is still there; an FsspecStore looks before it commits something, at most once a minute.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from typing import Protocol, runtime_checkable

from infra.stores.store import IDENTITY, Exists, Missing, Store, another_store, id_in

_LARGEST = 4096  # bytes of the object: it has some sixty


@runtime_checkable
class Pinnable(Protocol):
    """A store that can keep checking that it still has the same id."""

    def pin(self, identity: str) -> None:
        """Refuse from now on to write if the store has another id. Raise StoreError if it has one already."""


@runtime_checkable
class Creatable(Protocol):
    """A store whose place, such as a folder, can be created."""

    def create(self) -> None:
        """Create the place, unless it exists."""


def identity_of(store: Store) -> str:
    """Return the id of a store; empty if it has none."""
    try:
        return id_in(store.get(IDENTITY, _LARGEST), f"{store.url}/{IDENTITY}")
    except Missing:
        return ""


def identify(store: Store) -> str:
    """Return the id of a store, and pin it. A store without one gets one: call this to make a run only."""
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
    """Raise StoreError unless the store has this id, and pin it. An empty id is not checked."""
    if not identity:
        return
    found = identity_of(store)
    if found != identity:
        raise another_store(store.url, f"its id is {found}, not {identity}" if found else "")
    if isinstance(store, Pinnable):
        store.pin(identity)
