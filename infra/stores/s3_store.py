"""An object store behind any fsspec URL; S3 through s3fs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import fsspec

from infra.stores import multipart
from infra.stores.s3_refusals import LASTING_CODES, Refusal, code_of, explained, s3_refusal
from infra.stores.store import IDENTITY, Exists, Missing, StoreError, another_store, checked_key, id_in, whole

_PAUSES_S = (0.1, 0.3, 1.0, 3.0)  # before a put is tried again because another one was in its way
_SMALL = 1 << 16  # bytes: up to this size an object may be sent twice
_LARGE = 1 << 22  # bytes: a larger object is created only if a look finds none, and written in parts
_LOOK_S = 60.0  # after so long the store's id is looked at again before a commit


class FsspecStore:
    """A store on a server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._refuses = False  # the server was seen to refuse creating an object that exists
        self._reading: dict[str, Any] = {}
        self._id, self._looked = "", -math.inf
        options: dict[str, Any] = {"skip_instance_cache": True}
        if url.startswith("s3"):
            # a cached listing hides what other writers put
            more = {"retries": {"max_attempts": 5}, "max_pool_connections": 32}
            options |= {"use_listings_cache": False, "config_kwargs": more}
            self._reading = {"max_concurrency": 1}  # else s3fs asks for the size first
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise StoreError(f"store {url}: {error}") from error

    def pin(self, identity: str) -> None:
        """Refuse later commits if the store's id is not this one, which the caller has just looked at."""
        self._id, self._looked = identity, time.monotonic()

    def _check(self) -> None:
        """Raise StoreError unless the store has the known id: an emptied prefix gives no error by itself."""
        if not self._id or time.monotonic() - self._looked < _LOOK_S:
            return
        try:
            found = id_in(self.get(IDENTITY), f"{self.url}/{IDENTITY}")
        except Missing:
            found = ""
        if found != self._id:
            raise another_store(self.url, f"its id is {found}, not {self._id}" if found else "it has no id")
        self._looked = time.monotonic()

    def get(self, key: str, size: int | None = None) -> bytes:
        with self._asking(key, "read"):
            part = {"start": 0, "end": size + 1} if size else {}  # an empty object has no parts
            return bytes(self._fs.cat_file(self._path(key), **self._reading, **part))

    def get_part(self, key: str, at: int, size: int) -> bytes:
        with self._asking(key, "read"):
            data = bytes(self._fs.cat_file(self._path(key), start=at, end=at + size))
        return whole(data, size, f"{self.url}/{key}")

    def put(self, key: str, data: bytes) -> None:
        with self._asking(key, "written"):
            self._fs.pipe_file(self._path(key), data)

    def put_parts(self, key: str, parts: Iterable[bytes | memoryview], size: int) -> None:
        self._check()
        with self._asking(key, "written"):
            if size <= _LARGE:
                self._fs.pipe_file(self._path(key), b"".join(map(bytes, parts)))
            elif hasattr(self._fs, "call_s3"):
                multipart.put_in_parts(self._fs, self._path(key), parts, size)
            else:
                self._stream(key, parts)

    def _stream(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write through the file object of this kind of store, which stores nothing unless it is closed."""
        file = self._fs.open(self._path(key), "wb")
        try:
            for part in parts:
                file.write(part)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    def size(self, key: str) -> int:
        with self._asking(key, "looked up"):
            return int(self._fs.info(self._path(key))["size"])

    def put_new(self, key: str, data: bytes) -> None:
        self._check()
        # A server that refuses what is being sent may cut the connection, and s3fs sends it again.
        if len(data) > _LARGE and self.exists(key):
            raise Exists(f"{self.url}/{key} is there already")
        for pause_s in (*_PAUSES_S, None):
            try:
                self._fs.pipe_file(self._path(key), data, mode="create")
                break
            except Exception as error:  # botocore's errors share no base with OSError
                why = s3_refusal(error)
                if why is Refusal.EXISTS or (why is Refusal.CUT and self.exists(key)):
                    self._refuses |= why is Refusal.EXISTS
                    raise Exists(f"{self.url}/{key} is there already") from None
                if why is not Refusal.BUSY or pause_s is None:
                    raise self._failed(key, "written", error) from error
                time.sleep(pause_s)
        if not self._refuses and len(data) <= _SMALL:
            self._put_again(key, data)

    def _put_again(self, key: str, data: bytes) -> None:
        """Try to create the object again. Raise if that works: some servers ignore the condition."""
        try:
            self._fs.pipe_file(self._path(key), data, mode="create")
        except Exception as error:
            self._refuses = s3_refusal(error) is Refusal.EXISTS  # after another error, try again next time
            return
        raise StoreError(
            f"{self.url}/{key}: the server has overwritten what may be created only once (it ignores "
            "If-None-Match): two trainers could publish one version. Use another server, or file://"
        )

    def exists(self, key: str) -> bool:
        try:
            self._fs.cat_file(self._path(key), start=0, end=1)  # s3fs's exists() asks twice
        except Exception as error:
            failed = self._failed(key, "looked up", error)
            if isinstance(failed, Missing):
                return False
            if code_of(error) not in ("InvalidRange", "416"):  # it is there, and empty
                raise failed from error
        return True

    def list(self, prefix: str) -> list[str]:
        try:
            with self._asking(prefix, "listed"):
                found = self._fs.find(self._folder(prefix))
        except Missing:
            return []
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def delete(self, key: str) -> None:
        with contextlib.suppress(Missing), self._asking(key, "deleted"):
            self._fs.rm_file(self._path(key))

    def sweep(self, prefix: str, *, file_grace_s: float, upload_grace_s: float) -> int:
        """Abort uploads in parts that were begun long ago, by killed senders. Return how many there were."""
        if not hasattr(self._fs, "call_s3"):
            return 0
        bucket, _, folder = self._folder(prefix).rstrip("/").partition("/")
        found = 0
        with self._asking(prefix, "swept"):
            for upload, now in self._uploads(bucket, f"{folder}/"):
                if upload["Initiated"].timestamp() < now - upload_grace_s:
                    named = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    with contextlib.suppress(FileNotFoundError):  # it has just ended
                        self._fs.call_s3("abort_multipart_upload", **named)
                    found += 1
        return found

    def _uploads(self, bucket: str, prefix: str) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the uploads in parts that have not ended, each with the time by the server's clock."""
        marks: dict[str, str] = {}
        while True:
            page = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marks)
            now = _server_time(page)
            for upload in page.get("Uploads", []):
                yield upload, now
            if not page.get("IsTruncated"):
                return
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key, self.url)}"

    def _folder(self, prefix: str) -> str:
        return self._path(prefix.rstrip("/")) if prefix else f"{self._root}/"

    @contextlib.contextmanager
    def _asking(self, key: str, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._failed(key, what, error) from error

    def _failed(self, key: str, what: str, error: Exception) -> StoreError:
        if isinstance(error, StoreError):  # the key is none
            return StoreError(str(error))
        if isinstance(error, FileNotFoundError) and code_of(error) != "NoSuchBucket":
            return Missing(f"{self.url}/{key} is not there")
        failed = StoreError(f"{self.url}/{key} can't be {what}: {explained(error)}")
        failed.lasting = code_of(error) in LASTING_CODES
        return failed


def _server_time(answer: dict[str, Any]) -> float:
    """Return when a server answered, by its own clock, which times the uploads and may differ from ours."""
    said = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(said).timestamp()
    except (TypeError, ValueError):
        return time.time()
