"""What stores refuse, and what is said of it. Real servers are in tests/integration/test_store.py."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from fsspec.exceptions import FSTimeoutError

import infra.stores.s3_store
from infra.stores.opening import open_store
from infra.stores.orphans import sweep
from infra.stores.s3_refusals import explained
from infra.stores.store import Exists, Missing, Store, StoreError
from tests.fakes.s3 import Answer, Scripted, scripted

THERE = [
    Answer(412, "PreconditionFailed", condition="If-None-Match"),  # AWS, versitygw, moto
    Answer(412, "PreconditionFailed"),  # Ceph
    Answer(409, "BucketAlreadyExists"),  # Ceph's word for EEXIST
]
UNREACHABLE = "can't be reached: look at AWS_ENDPOINT_URL"
BUSY = Answer(409, "ConditionalRequestConflict")


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Scripted, Store]]:
    """botocore takes a second to read what S3 is: once is enough."""
    with scripted() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(infra.stores.s3_store, "_PAUSES_S", (0.0, 0.0))
        for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
            patch.delenv(name, raising=False)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "NO_PROXY": "127.0.0.1",
            "AWS_ENDPOINT_URL_S3": server.url, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nowhere",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        store = open_store("s3://bucket/mine")
        yield server, store


@pytest.fixture
def server(running: tuple[Scripted, Store]) -> Scripted:
    found = running[0]
    found.overwrites = False
    for kept in (found.answers, found.asked, found.objects):
        kept.clear()
    return found


@pytest.fixture
def store(running: tuple[Scripted, Store]) -> Store:
    return running[1]


@pytest.mark.parametrize("answer", THERE)
def test_what_is_there_is_not_created(server: Scripted, store: Store, answer: Answer) -> None:
    server.answers.append(answer)
    with pytest.raises(Exists, match="s3://bucket/mine/once is there already"):
        store.put_new("once", b"1")
    assert server.asked == ["PUT"]


@pytest.mark.parametrize("later", [None, THERE[0]])
def test_a_put_that_another_one_is_in_the_way_of_is_tried_again(
    server: Scripted, store: Store, later: Answer | None
) -> None:
    """The other one may fail, and it may win."""
    server.answers.extend([BUSY, BUSY, *([later] if later else [])])
    if later:
        with pytest.raises(Exists):
            store.put_new("once", b"1")
        assert not server.objects
    else:
        store.put_new("once", b"1")
        assert server.objects == {"/bucket/mine/once": b"1"}


def test_one_that_is_always_in_the_way_is_an_error(server: Scripted, store: Store) -> None:
    server.answers.extend([BUSY] * 3)
    with pytest.raises(StoreError, match="once can't be written: ConditionalRequestConflict") as caught:
        store.put_new("once", b"1")
    assert not isinstance(caught.value, Exists) and len(server.asked) == 3


def test_a_server_that_can_not_create_only_once_is_refused(server: Scripted, store: Store) -> None:
    server.answers.append(Answer(501, "NotImplemented"))
    with pytest.raises(StoreError, match=r"once can't be written: this server can't create .*If-None-Match"):
        store.put_new("once", b"1")


def test_a_server_that_overwrites_is_found_out(server: Scripted) -> None:
    server.overwrites, store = True, open_store("s3://bucket/mine")
    with pytest.raises(StoreError, match=r"once: the server has overwritten .*two trainers could publish"):
        store.put_new("once", b"1")


def test_it_is_found_out_once_and_with_little(server: Scripted) -> None:
    store = open_store("s3://bucket/mine")
    store.put_new("large", bytes(1 << 17))
    assert server.asked == ["PUT"]
    store.put_new("one", b"1")
    store.put_new("two", b"2")
    assert server.asked == ["PUT"] * 4


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(400, "ExpiredToken"), r"have expired: renew AWS_SESSION_TOKEN .*\(ExpiredToken: .*No\."),
        (Answer(403, "InvalidAccessKeyId"), "knows no such key: look at AWS_ACCESS_KEY_ID"),
        (Answer(404, "XAdminUserNotFound"), "knows no such key: look at AWS_ACCESS_KEY_ID"),
        (Answer(403, "SignatureDoesNotMatch"), "look at AWS_SECRET_ACCESS_KEY"),
        (Answer(403, "AccessDenied"), "not allowed: look at AWS_ACCESS_KEY_ID"),
        (Answer(404, "NoSuchBucket"), "there is no such bucket: make it, or correct the URL"),
        (Answer(507, "InsufficientStorage", "No space left on device."), "full: make room.*No space left"),
        (Answer(400, "Odd"), "Odd: "),
    ],
)
def test_errors_name_object_reason_and_variable(
    server: Scripted, store: Store, answer: Answer, said: str
) -> None:
    calls = {
        "read": lambda: store.get("x"), "written": lambda: store.put("x", b""),
        "listed": lambda: store.list("x"), "deleted": lambda: store.delete("x"),
    }  # fmt: skip
    for what, call in [*calls.items(), ("written", lambda: store.put_new("x", b""))]:
        server.answers.extend([answer] * 9)  # botocore tries some of them again
        with pytest.raises(StoreError, match=f"s3://bucket/mine/x can't be {what}: .*{said}") as caught:
            call()
        assert not isinstance(caught.value, Missing)
        server.answers.clear()


def test_an_object_is_asked_for_once(server: Scripted, store: Store) -> None:
    server.objects["/bucket/mine/x"] = b"it"
    assert store.get("x") == b"it"
    with pytest.raises(Missing, match="s3://bucket/mine/y is not there"):
        store.get("y")
    assert server.asked == ["GET", "GET"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EndpointConnectionError(endpoint_url="http://s3:1"), f"{UNREACHABLE}.*s3:1"),
        (ConnectTimeoutError(endpoint_url="http://s3:1"), f"{UNREACHABLE}.*s3:1"),
        (ReadTimeoutError(endpoint_url="http://s3:1"), f"{UNREACHABLE}.*s3:1"),
        (FSTimeoutError(), UNREACHABLE),
        (NoCredentialsError(), "there are no credentials: look at AWS_ACCESS_KEY_ID"),
        (PartialCredentialsError(provider="env", cred_var="AWS_SECRET_ACCESS_KEY"), "not complete: look at"),
    ],
)
def test_no_server_and_no_keys(error: Exception, said: str) -> None:
    assert re.search(said, explained(error))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    store.put("x", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))  # Python ignores the signal
    try:
        for put in (store.put, store.put_new):
            with pytest.raises(StoreError, match=r"store/(x|y) can't be written: .*too large"):
                put("x" if put == store.put else "y", bytes(1 << 13))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (os.listdir(tmp_path / "store"), store.get("x")) == (["x"], b"old")


KEYS = ["/etc/passwd", "..", "a/../../b", "../a", "a/..", "a//b", "a/", "", ".", "./a", "a/./b", "a\0b"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_leads_elsewhere_is_refused(key: str, tmp_path: Path, store: Store) -> None:
    own = open_store(f"file://{tmp_path}/store")
    (tmp_path / "b").write_bytes(b"not the store's")
    for one in (own, store):
        for call in (
            one.get, one.exists, one.size, one.delete, lambda key, one=one: one.get_part(key, 0, 1),
            lambda key, one=one: one.put(key, b""), lambda key, one=one: one.put_new(key, b""),
            lambda key, one=one: one.put_parts(key, [b""], 0),
        ):  # fmt: skip
            with pytest.raises(StoreError, match=re.escape(f"{key!r} is no key of an object in {one.url}")):
                call(key)
    assert os.listdir(tmp_path) == ["b"]
    for prefix in ("..", "a/../..", "/etc"):
        with pytest.raises(StoreError, match="is no key"):
            own.list(prefix)


def test_keys_with_dots_in_names_are_keys(tmp_path: Path) -> None:
    own = open_store(f"file://{tmp_path}/store")
    keys = ["..a", "a/...", "a/.hidden", "a/b..", "runs/a-1/run.json"]
    for key in keys:
        own.put(key, b"")
    assert own.list("") == keys and own.list("a/") == keys[1:4]


def test_a_disk_error_names_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"store/a/x can't be written: .*No space left on device"):
        open_store(f"file://{tmp_path}/store").put_new("a/x", b"1")
    assert not list((tmp_path / "store").rglob("*x*"))


def test_a_folder_that_is_removed_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is removed while another one is looked for."""
    store, scan = open_store(f"file://{tmp_path}/store"), os.scandir
    for key in ("runs/a/deep/run.json", "runs/b/run.json"):
        store.put(key, b"1")

    def removed(path: str | Path) -> Any:
        if Path(path).name == "deep":
            (Path(path) / "run.json").unlink()
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", removed)
    assert store.list("runs") == ["runs/b/run.json"]
    assert sweep(store, "runs") == 0


def test_a_folder_that_can_not_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = open_store(f"file://{tmp_path}/store")
    store.put("runs/a/run.json", b"1")
    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(StoreError, match=r"store/runs can't be listed: .*Input/output error"):
        store.list("runs")
