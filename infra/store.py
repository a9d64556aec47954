"""The object store: whole objects by key under one URL, `s3://…` or `file://…`, with one code path.

An object is there whole or not at all. `put_new` creates and never overwrites: what commits a version or a
checkpoint. Credentials for S3 come from the environment (AWS_ACCESS_KEY_ID and so on, AWS_ENDPOINT_URL).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any, Protocol

import fsspec

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

    def get(self, key: str) -> bytes:
        """An object; raises Missing."""

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
    return FsspecStore(url)


class FileStore:
    """A folder. fsspec's exclusive create can leave half an object after a crash: here a link commits it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = Path(self.url.removeprefix("file://"))
        if not self._root.is_absolute():
            raise StoreError(f"store {url}: file:// needs an absolute path")

    def get(self, key: str) -> bytes:
        try:
            return (self._root / key).read_bytes()
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
    def _written(self, key: str, data: bytes) -> Any:
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
        (self._root / key).unlink(missing_ok=True)


class FsspecStore:
    """Any other fsspec URL; S3 through s3fs."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        options: dict[str, Any] = {"skip_instance_cache": True}
        if url.startswith("s3"):
            # a cached listing hides what other writers put
            options |= {"use_listings_cache": False, "config_kwargs": {"retries": {"max_attempts": 5}}}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise StoreError(f"store {url}: {error}") from error

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def get(self, key: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except FileNotFoundError:
            raise Missing(f"{self.url}/{key} is not there") from None
        except Exception as error:  # botocore's errors share no base with OSError
            raise StoreError(f"{self.url}/{key} can't be read: {_short(error)}") from error

    def put(self, key: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(self._path(key), data)
        except Exception as error:
            raise StoreError(f"{self.url}/{key} can't be written: {_short(error)}") from error

    def put_new(self, key: str, data: bytes) -> None:
        try:
            self._fs.pipe_file(self._path(key), data, mode="create")
        except FileExistsError:
            raise Exists(f"{self.url}/{key} is there already") from None
        except Exception as error:
            if _refused_as_existing(error):
                raise Exists(f"{self.url}/{key} is there already") from None
            raise StoreError(f"{self.url}/{key} can't be written: {_short(error)}") from error

    def exists(self, key: str) -> bool:
        return bool(self._fs.exists(self._path(key)))

    def list(self, prefix: str) -> list[str]:
        try:
            found = self._fs.find(self._path(prefix))
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refused_as_existing(error: BaseException | None) -> bool:
    """Ceph's gateway answers a lost race with a plain OSError around the 412."""
    while error is not None:
        code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
        if code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
            return True
        error = error.__cause__
    return False
