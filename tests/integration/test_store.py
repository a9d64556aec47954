"""The store contract: the same checks against a folder and against a real S3 server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import torch

from infra.store import Exists, Missing, Store, StoreError, open_store
from infra.weights.versions import WeightStore


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "file":
        return open_store(f"file://{request.getfixturevalue('tmp_path')}/store")
    access = request.getfixturevalue("s3")
    for name, value in access.env().items():
        monkeypatch.setenv(name, value)
    return open_store(f"{access.url}/{uuid4().hex}")


def test_put_get_list_delete(store: Store) -> None:
    assert store.list("a") == []
    store.put("a/b/one", b"1")
    store.put("a/two", b"2")
    store.put("a/two", b"22")
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


def test_a_wrong_secret_is_refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    access = request.getfixturevalue("s3")
    for name, value in access.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreError, match="x can't be written"):
        open_store(f"{access.url}/wrong").put("x", b"1")


@pytest.mark.parametrize("url", ["/just/a/path", "file://relative/path", "nosuch://x/y"])
def test_bad_urls_are_said(url: str) -> None:
    with pytest.raises(StoreError):
        open_store(url)
