"""The object store: whole objects by key under one URL, `s3://…` or `file://…`, with one code path.

An object is there whole or not at all. `put_new` creates and never overwrites: what commits a version or a
checkpoint; a server that overwrites all the same is found out, and refused. Credentials for S3 come from the
environment (AWS_ACCESS_KEY_ID and so on, AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from infra.errors import Explained


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
        """An object; raises Missing. `size`: what it has, if that is known: of one that has more no more than
        a byte is read beyond that; a far store is read in parts."""

    def get_part(self, key: str, at: int, size: int) -> bytes:
        """So many bytes of an object, which it must have; raises Missing."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over the old one if there is one."""

    def put_new(self, key: str, data: bytes) -> None:
        """Write an object that is not there yet; raises Exists. Of several writers exactly one wins."""

    def exists(self, key: str) -> bool:
        """Whether an object is there."""

    def list(self, prefix: str) -> list[str]:
        """Keys under a folder, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""


def open_store(url: str) -> Store:
    """The store at an fsspec URL."""
    if "://" not in url:
        raise StoreError(f"store {url!r}: a URL is expected, such as s3://bucket/prefix or file:///path")
    if url.startswith("file://"):
        return FileStore(url)
    from infra.remote_store import FsspecStore

    return FsspecStore(url)


class FileStore:
    """A folder. fsspec's exclusive create can leave half an object after a crash: here a link commits it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = Path(self.url.removeprefix("file://"))
        if not self._root.is_absolute():
            raise StoreError(f"store {url}: file:// needs an absolute path")

    def get(self, key: str, size: int | None = None) -> bytes:
        with self._reading(key), (self._root / key).open("rb") as file:
            return file.read() if size is None else file.read(size + 1)

    def get_part(self, key: str, at: int, size: int) -> bytes:
        with self._reading(key), (self._root / key).open("rb") as file:
            file.seek(at)
            return whole(file.read(size), size, f"{self.url}/{key}")

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"{self.url}/{key} is not there") from None
        except OSError as error:
            raise StoreError(f"{self.url}/{key} can't be read: {error}") from error

    def put(self, key: str, data: bytes) -> None:
        with self._written(key, data) as (temporary, target):
            temporary.replace(target)

    def put_new(self, key: str, data: bytes) -> None:
        with self._written(key, data) as (temporary, target):
            try:
                os.link(temporary, target)
            except FileExistsError:
                raise Exists(f"{self.url}/{key} is there already") from None

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes) -> Iterator[tuple[Path, Path]]:
        target = self._root / key
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary, target
        except OSError as error:
            raise StoreError(f"{self.url}/{key} can't be written: {error}") from error
        finally:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink()

    def exists(self, key: str) -> bool:
        return (self._root / key).is_file()

    def list(self, prefix: str) -> list[str]:
        folder = self._root / prefix
        files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
        return sorted(str(path.relative_to(self._root)) for path in files)

    def delete(self, key: str) -> None:
        try:
            (self._root / key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.url}/{key} can't be deleted: {error}") from error


def whole(data: bytes, size: int, what: str) -> bytes:
    """Bytes that came, if they are all."""
    if len(data) != size:
        raise StoreError(f"{what} ends too soon: {len(data)} of {size} bytes came")
    return data
