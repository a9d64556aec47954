"""The store contract: the same checks against a folder and against a real S3 server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import torch

from infra.stack.s3 import S3Access
from infra.stores.opening import open_store
from infra.stores.orphans import sweep
from infra.stores.s3_store import FsspecStore
from infra.stores.store import IDENTITY, Exists, Missing, Store, StoreError
from infra.stores.store_identity import check_identity, identify
from infra.weights.versions import WeightStore
from schemas.stores import OWN_STORES
from tests.examples import write_examples
from tests.fakes import another_s3


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Access]:
    with another_s3.moto() as access:
        yield access


@pytest.fixture(params=["file", "s3", "moto", "sqlite"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "file":
        return open_store(f"file://{request.getfixturevalue('tmp_path')}/store")
    if request.param == "sqlite":  # the store of docs/extending/store.md
        folder = request.getfixturevalue("tmp_path")
        monkeypatch.setenv(OWN_STORES, f"sqlite={write_examples('extending/store', folder)}:SqliteStore")
        return open_store(f"sqlite://{folder}/objects.db")
    access = request.getfixturevalue(request.param)
    for name, value in access.env().items():
        monkeypatch.setenv(name, value)
    return open_store(f"{access.url}/{uuid4().hex}")


@pytest.mark.parametrize("size", [0, 1000, (5 << 20) + 3, (70 << 20) + 7])
def test_an_object_in_parts_is_whole_or_as_it_was(store: Store, size: int) -> None:
    """A part is written over as soon as the next one is asked for, as the trainer's are."""
    data = random.Random(size).randbytes(size)
    room = bytearray(1 << 20)

    def parts(until: int) -> Iterator[memoryview]:
        for at in range(0, size, len(room)):
            if at >= until:
                raise ValueError("the sender fails")
            piece = data[at : at + len(room)]
            room[: len(piece)] = piece
            yield memoryview(room)[: len(piece)]

    store.put_parts("a/large", parts(size), size)
    assert store.size("a/large") == size
    assert store.get("a/large") == data
    if size > 1 << 20:
        with pytest.raises((ValueError, StoreError), match="the sender fails"):
            store.put_parts("a/large", parts(size // 2), size)
        assert store.get("a/large") == data
        assert store.list("a") == ["a/large"]
    with pytest.raises(Missing):
        store.size("a/none")


def test_put_get_list_delete(store: Store) -> None:
    assert store.list("a") == []
    store.put("a/b/one", b"1")
    store.put("a/two", b"2")
    store.put("a/two", b"22")
    store.put("empty", b"")
    assert store.exists("empty")
    assert store.get("a/two") == b"22"
    assert store.list("a") == ["a/b/one", "a/two"]
    assert store.exists("a/two")
    store.delete("a/two")
    store.delete("a/two")
    assert not store.exists("a/two")
    assert store.list("a") == ["a/b/one"]


def test_missing_objects_are_named(store: Store) -> None:
    with pytest.raises(Missing, match="no/such is not there"):
        store.get("no/such")


def test_put_new_never_overwrites(store: Store) -> None:
    store.put_new("once", b"first")
    with pytest.raises(Exists, match="once is there already"):
        store.put_new("once", b"second")
    assert store.get("once") == b"first"


@pytest.mark.parametrize("store", ["file", "s3"], indirect=True)  # moto looks first, and writes later
def test_of_eight_writers_one_wins(store: Store) -> None:
    def attempt(number: int) -> int | None:
        try:
            open_store(store.url).put_new("race", str(number).encode())
        except Exists:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(attempt, range(8)) if number is not None]
    assert len(winners) == 1
    assert store.get("race") == str(winners[0]).encode()


def test_what_others_put_is_seen(store: Store) -> None:
    other = open_store(store.url)
    assert store.list("x") == []
    other.put("x/new", b"1")
    assert store.list("x") == ["x/new"]
    assert store.exists("x/new")


def test_weights_go_through(store: Store) -> None:
    tensors = {"w": torch.randn(64, 64), "b": torch.zeros(64, dtype=torch.bfloat16)}
    manifest = WeightStore(store, "r-1").publish(1, tensors, trainer_epoch=0)
    _, found = WeightStore(open_store(store.url), "r-1").fetch(1, root=manifest.root)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("mib", [8, 64, 101])  # s3fs puts what is larger than 100 in parts
def test_large_objects_are_created_once(store: Store, mib: int) -> None:
    data = (bytes(1 << 19) + random.Random(mib).randbytes(1 << 19)) * mib
    store.put_new("large", data)
    with pytest.raises(Exists, match="large is there already"):
        store.put_new("large", data + b"other")
    assert store.get("large") == data


@pytest.mark.parametrize("mib", [8, 64, 101])
@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_of_two_that_send_a_large_object_one_wins(
    store: Store, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    """The other one has come between a look and the put."""
    looked = FsspecStore.exists

    def late(self: FsspecStore, key: str) -> bool:
        monkeypatch.setattr(FsspecStore, "exists", looked)
        return False

    store.put_new("large", b"first")
    monkeypatch.setattr(FsspecStore, "exists", late)
    with pytest.raises(Exists, match="large is there already"):
        store.put_new("large", bytes(mib << 20))
    assert store.get("large") == b"first"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_ACCESS_KEY_ID", "nobody", "look at AWS_ACCESS_KEY_ID"),
        ("AWS_SECRET_ACCESS_KEY", "wrong", "look at AWS_SECRET_ACCESS_KEY"),
        ("AWS_SESSION_TOKEN", "old", "look at AWS_SESSION_TOKEN"),
    ],
)
def test_credentials_that_are_wrong_are_named(
    s3: S3Access, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    for known in s3.env().items():
        monkeypatch.setenv(*known)
    monkeypatch.setenv(name, value)
    store = open_store(f"{s3.url}/wrong")
    for call in (lambda: store.get("x"), lambda: store.put("x", b"1"), lambda: store.put_new("x", b"1")):
        with pytest.raises(StoreError, match=f"{s3.url}/wrong/x can't be .*{said}"):
            call()
    with pytest.raises(StoreError, match=f"x can't be listed: .*{said}"):
        store.list("x")


def test_a_bucket_that_is_not_there_is_named(s3: S3Access, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in s3.env().items():
        monkeypatch.setenv(*known)
    store = open_store("s3://nowhere/mine")
    for call in (lambda: store.get("x"), lambda: store.put_new("x", b"1"), lambda: store.list("x")):
        with pytest.raises(StoreError, match=r"nowhere/mine/x can't be .*there is no such bucket") as caught:
            call()
        assert not isinstance(caught.value, Missing)


@pytest.mark.parametrize("url", ["/just/a/path", "file://relative/path", "nosuch://x/y"])
def test_bad_urls_are_said(url: str) -> None:
    with pytest.raises(StoreError):
        open_store(url)


@pytest.mark.parametrize("store", ["file", "s3", "moto"], indirect=True)  # those that can be pinned
def test_a_store_has_an_id_and_an_emptied_one_is_not_committed_to(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = identify(store)
    assert identify(open_store(store.url)) == mine
    store.put_new("a", b"1")
    store.delete(IDENTITY)  # with all else
    monkeypatch.setattr("infra.stores.s3_store._LOOK_S", 0.0)
    with pytest.raises(StoreError, match=r"is not the one that this run began in .*is it mounted"):
        store.put_new("b", b"1")
    with pytest.raises(StoreError, match=r"is not the one that this run began in"):
        check_identity(open_store(store.url), mine)


@pytest.mark.parametrize("store", ["s3"], indirect=True)  # moto says of all that they began in 2010
def test_uploads_that_were_killed_are_aborted_when_they_are_old(store: Store) -> None:
    assert isinstance(store, FsspecStore)
    bucket, _, folder = store._path("runs/a-1").partition("/")
    keys = [f"{folder}/large", f"{folder}-other/large"]
    for key in keys:
        begun = store._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        named = {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"], "PartNumber": 1}
        store._fs.call_s3("upload_part", **named, Body=bytes(5 << 20))

    def there() -> list[str]:
        return [upload["Key"] for upload, _ in store._uploads(bucket, folder) if upload["Key"] in keys]

    assert sweep(store, "runs/a-1") == 0
    assert sorted(there()) == sorted(keys)
    assert sweep(store, "runs/a-1", upload_grace_s=-60.0) == 1
    assert there() == [keys[1]]
    assert sweep(store, "runs", upload_grace_s=-60.0) == 1
