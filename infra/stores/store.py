"""The object store: whole objects by key under one URL, `s3://…` or `file://…`, with one code path.

An object is there whole or not at all. `put_new` creates and never overwrites: what commits a version or a
checkpoint; a server that overwrites all the same is found out, and refused. Credentials for S3 come from the
environment (AWS_ACCESS_KEY_ID and so on, AWS_ENDPOINT_URL).

A store that has an id (`infra.stores.store_identity`) is written only while it is that one: what is left in
its place when a disk was unmounted stays empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from infra.errors import Explained

IDENTITY = "streamrl-store.json"  # says which store it is


class StoreError(Explained):
    """The store can't do what is asked; the message names the object."""


class Missing(StoreError):
    """No such object."""


class Exists(StoreError):
    """`put_new` found the object there already."""


class Store(Protocol):
    """Whole objects by key."""

    url: str

    def get(self, key: str, size: int | None = None) -> bytes:
        """An object; raises Missing. `size`: what it has, or the most that it may have: of a larger one no
        more than a byte beyond is read. What is known is read of a far store in parts."""

    def get_part(self, key: str, at: int, size: int) -> bytes:
        """So many bytes of an object, which it must have; raises Missing."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over the old one if there is one."""

    def put_new(self, key: str, data: bytes) -> None:
        """Write an object that is not there yet; raises Exists. Of several writers exactly one wins."""

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        """`put` of so many bytes, which need not be in memory at once; an error leaves the old object.

        A part may be written over as soon as the next one is asked for.
        """

    def size(self, key: str) -> int:
        """Bytes of an object; raises Missing."""

    def exists(self, key: str) -> bool:
        """Whether an object is there."""

    def list(self, prefix: str) -> list[str]:
        """Keys under a folder, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""


@runtime_checkable
class Prunable(Protocol):
    """A store in which folders are left when their objects are gone."""

    def prune(self, prefix: str) -> None:
        """Remove empty folders from a folder on, and that one."""


def id_in(raw: bytes, where: str) -> str:
    """The id that a store's own object says."""
    try:
        found = json.loads(raw)["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str) or not found:
        raise StoreError(f"{where} does not say which store this is: bring the file back from a copy")
    return found


def another_store(url: str, why: str) -> StoreError:
    """The error when a store is not the one that it was."""
    return StoreError(
        f"the store at {url} is not the one that this run began in{f' ({why})' if why else ''}: is it "
        f"mounted? Nothing was written. If you have moved the run's store, move {IDENTITY} with it"
    )


def whole(data: bytes, size: int, what: str) -> bytes:
    """Bytes that came, if they are all."""
    if len(data) != size:
        raise StoreError(f"{what} ends too soon: {len(data)} of {size} bytes came")
    return data
