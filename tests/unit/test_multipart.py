"""Large objects in parts: several at once, in their order, and nothing is left of one that failed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.stores import multipart
from infra.stores.file_store import FileStore
from infra.stores.store import Missing, StoreError


class Fake:
    """The four calls of s3fs that are needed."""

    def __init__(self, fails: str = "") -> None:
        self.sent: dict[int, bytes] = {}
        self.object: bytes | None = None
        self.calls: list[str] = []
        self._fails, self._lock, self._now, self.most = fails, threading.Lock(), 0, 0

    def call_s3(self, call: str, **given: Any) -> dict[str, Any]:
        assert (given["Bucket"], given["Key"]) == ("bucket", "a/b")
        with self._lock:
            self.calls.append(call)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if call == self._fails:
                raise OSError(f"{call} is refused")
            return self._do(call, given)
        finally:
            with self._lock:
                self._now -= 1

    def _do(self, call: str, given: dict[str, Any]) -> dict[str, Any]:
        if call == "upload_part":
            self.sent[given["PartNumber"]] = given["Body"]
            return {"ETag": f"etag {given['PartNumber']}"}
        if call == "complete_multipart_upload":
            parts = given["MultipartUpload"]["Parts"]
            assert [part["PartNumber"] for part in parts] == list(range(1, len(parts) + 1))
            assert [part["ETag"] for part in parts] == [f"etag {n}" for n in range(1, len(parts) + 1)]
            self.object = b"".join(self.sent[part["PartNumber"]] for part in parts)
        return {"UploadId": "7"}


def reused(data: bytes, sizes: list[int]) -> Iterator[memoryview]:
    """Parts in one buffer."""
    room, at = bytearray(max(sizes, default=1)), 0
    for size in itertools.cycle(sizes):
        if at >= len(data):
            return
        piece = data[at : at + size]
        room[: len(piece)] = piece
        yield memoryview(room)[: len(piece)]
        at += size


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 60))
@settings(deadline=None, max_examples=50)
def test_what_arrives_is_what_was_sent(data: bytes, sizes: list[int], smallest: int) -> None:
    fake = Fake()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipart, "_SMALLEST", smallest)
        patch.setattr(multipart, "_MOST", 20)
        multipart.put_in_parts(fake, "bucket/a/b", reused(data, sizes), len(data))
    assert fake.object == data
    assert len(fake.sent) <= 20 + 1
    assert fake.most <= multipart._UNDER_WAY
    assert all(len(part) >= smallest for number, part in fake.sent.items() if number < len(fake.sent))


@pytest.mark.parametrize("fails", ["upload_part", "complete_multipart_upload", "the sender"])
def test_nothing_is_left_of_one_that_fails(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "_SMALLEST", 10)
    fake = Fake(fails)

    def parts() -> Iterator[bytes]:
        yield bytes(35)
        if fails == "the sender":
            raise OSError("the sender is refused")

    with pytest.raises(OSError, match=f"{fails} is refused"):
        multipart.put_in_parts(fake, "bucket/a/b", parts(), 35)
    assert fake.object is None
    assert fake.calls[-1] == "abort_multipart_upload"


def test_a_file_in_parts_replaces_the_old_one_when_it_is_whole(tmp_path: Path) -> None:
    store = FileStore(f"file://{tmp_path}/store")

    def failing() -> Iterator[bytes]:
        yield b"half"
        raise StoreError("the sender fails")

    store.put_parts("a/b", reused(b"0123456789", [3]), 10)
    with pytest.raises(StoreError, match="the sender fails"):
        store.put_parts("a/b", failing(), 10)
    assert store.get("a/b") == b"0123456789"
    assert store.size("a/b") == 10
    assert [path.name for path in (tmp_path / "store" / "a").iterdir()] == ["b"]
    with pytest.raises(Missing):
        store.size("a/c")
