"""The object store: whole objects by key under one URL, `s3://…` or `file://…`, with one code path.

An object is there whole or not at all. `put_new` creates an object and never overwrites one; versions and
checkpoints are committed by it. A server that overwrites nevertheless is found out and refused. Credentials
for S3 come from the environment (AWS_ACCESS_KEY_ID and so on, AWS_ENDPOINT_URL).

A store that has an id (`infra.stores.store_identity`) is written to only while it has that id. So the empty
folder that an unmounted disk leaves in its place stays empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from infra.errors import Explained

IDENTITY = "streamrl-store.json"  # the object with the store's id


class StoreError(Explained):
    """The store can't do what is asked; the message names the object."""


class Missing(StoreError):
    """There is no such object."""


class Exists(StoreError):
    """`put_new` found the object there already."""


class Store(Protocol):
    """A store of whole objects by key."""

    url: str

    def get(self, key: str, size: int | None = None) -> bytes:
        """Return an object; raise Missing if there is none.

        `size`: the bytes that the object has or may have; of a larger one only `size` + 1 bytes are read.
        With a size, objects of a far store are read in parts.
        """

    def get_part(self, key: str, at: int, size: int) -> bytes:
        """Return `size` bytes of an object from `at` on; raise Missing, or StoreError if it is too short."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, and replace the old one if there is one."""

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raise Exists if it is there. Of several writers exactly one wins."""

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        """Write `size` bytes, which need not be in memory at once. An error leaves the old object.

        The memory of a part may be used again as soon as the next part is asked for.
        """

    def size(self, key: str) -> int:
        """Return the number of bytes of an object; raise Missing if there is none."""

    def exists(self, key: str) -> bool:
        """Return whether an object is there."""

    def list(self, prefix: str) -> list[str]:
        """Return the keys under a folder, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""


@runtime_checkable
class Prunable(Protocol):
    """A store in which folders are left behind when their objects are gone."""

    def prune(self, prefix: str) -> None:
        """Remove all empty folders under a folder, and the folder itself if it is empty."""


def checked_key(key: str, url: str) -> str:
    """Return a key. Raise StoreError if it is absolute, or has a part that is empty, `.` or `..`."""
    around = f"/{key}/"  # each part stands between two slashes
    if "//" in around or "/./" in around or "/../" in around or "\0" in key:
        raise StoreError(f"{key[:200]!r} is no key of an object in {url}: a key is like runs/a-1/run.json")
    return key


def id_in(raw: bytes, where: str) -> str:
    """Return the id in the bytes of a store's id object. Raise StoreError if there is none."""
    try:
        found = json.loads(raw)["id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str) or not found:
        raise StoreError(f"{where} does not say which store this is: bring the file back from a copy")
    return found


def another_store(url: str, why: str) -> StoreError:
    """Return the error that a store is not the one that the run began in."""
    return StoreError(
        f"the store at {url} is not the one that this run began in{f' ({why})' if why else ''}: is it "
        f"mounted? Nothing was written. If you have moved the run's store, move {IDENTITY} with it"
    )


def whole(data: bytes, size: int, what: str) -> bytes:
    """Return the bytes if there are `size` of them; else raise StoreError."""
    if len(data) != size:
        raise StoreError(f"{what} ends too soon: {len(data)} of {size} bytes came")
    return data
