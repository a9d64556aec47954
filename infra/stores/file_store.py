"""A folder as an object store: each object is a file, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from infra.files.private import make_private
from infra.stores.store import IDENTITY, Exists, Missing, StoreError, another_store, checked_key, id_in, whole

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp", re.DOTALL)


class FileStore:
    """A store in a folder. A link commits a new object: fsspec's exclusive create can leave half of one."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = Path(self.url.removeprefix("file://"))
        if not self._root.is_absolute():
            raise StoreError(f"store {url}: file:// needs an absolute path")
        self._id = ""  # once it is known, nothing is written into a folder with another one
        self._seen: tuple[int, int] | None = None  # device and inode of the file with the id
        if (self._root / IDENTITY).is_file():
            self.pin(self._id_now())

    def create(self) -> None:
        """Create the folder, for this user alone, unless it exists."""
        try:
            make_private(self._root)
        except OSError as error:
            raise StoreError(f"the store at {self.url} can't be made: {error}") from error

    def pin(self, identity: str) -> None:
        """Raise StoreError, now and before each later write, if the folder's id is not this one."""
        self._id, self._seen = identity, None
        self._check()

    def get(self, key: str, size: int | None = None) -> bytes:
        with self._reading(key), self._path(key).open("rb") as file:
            return file.read() if size is None else file.read(size + 1)

    def get_part(self, key: str, at: int, size: int) -> bytes:
        with self._reading(key), self._path(key).open("rb") as file:
            file.seek(at)
            return whole(file.read(size), size, f"{self.url}/{key}")

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            self._check()
            raise Missing(f"{self.url}/{key} is not there") from None
        except OSError as error:
            raise StoreError(f"{self.url}/{key} can't be read: {error}") from error

    def put(self, key: str, data: bytes) -> None:
        self.put_parts(key, [data], len(data))

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        with self._written(key, parts) as (temporary, target):
            temporary.replace(target)

    def size(self, key: str) -> int:
        with self._reading(key):
            return self._path(key).stat().st_size

    def put_new(self, key: str, data: bytes) -> None:
        with self._written(key, [data]) as (temporary, target):
            try:
                os.link(temporary, target)
            except FileExistsError:
                raise Exists(f"{self.url}/{key} is there already") from None

    @contextlib.contextmanager
    def _written(self, key: str, parts: Iterable[bytes | memoryview]) -> Iterator[tuple[Path, Path]]:
        self._check()
        target = self._path(key)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            make_private(target.parent)
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            try:
                self._check()  # it may have taken a while
            except StoreError:
                self._take_back(temporary)
                raise
            yield temporary, target
        except OSError as error:
            raise StoreError(f"{self.url}/{key} can't be written: {error}") from error
        finally:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                temporary.unlink()

    def _take_back(self, temporary: Path) -> None:
        """Remove a file, and the folders made for it, from what is left of a store that vanished."""
        with contextlib.suppress(OSError):  # nothing is there, or another write's file is
            temporary.unlink()
            for folder in temporary.parents:
                if folder == self._root:
                    break
                folder.rmdir()

    def exists(self, key: str) -> bool:
        found = self._path(key).is_file()
        if not found:
            self._check()
        return found

    def list(self, prefix: str) -> list[str]:
        files = (path for path in self._files(prefix) if path.is_file() and not path.name.endswith(".tmp"))
        found = sorted(str(path.relative_to(self._root)) for path in files)
        if not found:
            self._check()
        return found

    def _files(self, prefix: str) -> Iterator[Path]:
        """Yield all files under a folder. Folders that somebody removes meanwhile are passed over."""

        def failed(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
                raise StoreError(f"{self.url}/{prefix} can't be listed: {error}") from error

        for folder, _, names in os.walk(self._folder(prefix), onerror=failed):
            yield from (Path(folder, name) for name in names)

    def delete(self, key: str) -> None:
        self._check()
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.url}/{key} can't be deleted: {error}") from error

    def sweep(self, prefix: str, *, file_grace_s: float, upload_grace_s: float) -> int:
        """Remove temporary files of killed writes, if older than the grace. Return how many there were."""
        self._check()
        before, found = time.time() - file_grace_s, 0
        for path in self._files(prefix):
            with contextlib.suppress(OSError):  # its writer has just removed it, or it is not ours
                if _TEMPORARY.fullmatch(path.name) and path.stat().st_mtime < before:
                    path.unlink()
                    found += 1
        return found

    def prune(self, prefix: str) -> None:
        """Remove all empty folders under a folder, and the folder itself if it is empty."""
        self._check()
        top = self._folder(prefix)
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):  # it is not empty
                Path(folder).rmdir()

    def _path(self, key: str) -> Path:
        return self._root / checked_key(key, self.url)

    def _folder(self, prefix: str) -> Path:
        return self._path(prefix.rstrip("/")) if prefix else self._root

    def _check(self) -> None:
        """Raise StoreError unless the folder has the known id. Mostly this costs one `stat` of a file."""
        if not self._id:
            return
        try:
            there = (self._root / IDENTITY).stat()
        except OSError as error:
            raise another_store(self.url, str(error)) from None
        if (there.st_dev, there.st_ino) == self._seen:
            return
        if (found := self._id_now()) != self._id:  # a newly mounted disk may be the same store
            raise another_store(self.url, f"its id is {found}, not {self._id}")
        self._seen = there.st_dev, there.st_ino

    def _id_now(self) -> str:
        file = self._root / IDENTITY
        try:
            return id_in(file.read_bytes(), str(file))
        except OSError as error:
            raise another_store(self.url, str(error)) from None
