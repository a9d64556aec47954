"""A store knows which one it is: what stands in its place when it is gone is not written to."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from infra.files.private import make_private
from infra.stores.file_store import FileStore
from infra.stores.opening import open_store
from infra.stores.orphans import sweep
from infra.stores.store import IDENTITY, Missing, StoreError
from infra.stores.store_identity import check_identity, identify, identity_of

GONE = (
    r"the store at file://.*store is not the one that this run began in .*is it mounted\? Nothing was written"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def unmount(folder: Path) -> None:
    """An empty folder is left, as under a mount point."""
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()


def test_a_store_gets_one_id_for_good(folder: Path) -> None:
    store = open_store(f"file://{folder}")
    assert identity_of(store) == "" and not folder.exists()
    found = identify(store)
    assert found and identify(open_store(store.url)) == identity_of(store) == found
    check_identity(store, found)
    check_identity(store, "")  # of a run that was made before stores had ids


def test_nothing_is_written_into_what_is_left_of_an_unmounted_store(folder: Path) -> None:
    store = FileStore(f"file://{folder}")
    identify(store)
    store.put("runs/a", b"1")
    unmount(folder)
    calls = {
        "put": lambda: store.put("runs/a", b"2"), "put_new": lambda: store.put_new("b", b"2"),
        "get": lambda: store.get("runs/a"), "part": lambda: store.get_part("runs/a", 0, 1),
        "exists": lambda: store.exists("runs/a"), "list": lambda: store.list("runs"),
        "delete": lambda: store.delete("runs/a"), "sweep": lambda: sweep(store, "runs"),
    }  # fmt: skip
    for call in calls.values():
        with pytest.raises(StoreError, match=GONE) as caught:
            call()
        assert not isinstance(caught.value, Missing)
    assert list(folder.iterdir()) == []


def test_a_store_that_comes_back_is_the_same(folder: Path) -> None:
    """A disk that is mounted anew may have another device number."""
    store = FileStore(f"file://{folder}")
    identify(store)
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match=GONE):
        store.put("a", b"1")
    folder.with_name("copy").rename(folder)
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_write_that_a_disk_vanishes_under_is_not_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(f"file://{folder}")
    identify(store)
    monkeypatch.setattr("infra.stores.file_store.os.fsync", lambda fd: unmount(folder))
    with pytest.raises(StoreError, match=GONE):
        store.put("a", b"1")
    assert not list(folder.rglob("a"))


def test_no_folders_are_left_by_a_write_that_a_disk_vanishes_under(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(made: Path) -> None:
        unmount(folder)
        make_private(made)

    store = FileStore(f"file://{folder}")
    identify(store)
    monkeypatch.setattr("infra.stores.file_store.make_private", late)
    with pytest.raises(StoreError, match=GONE):
        store.put("runs/b/c", b"1")
    assert list(folder.iterdir()) == []


def test_another_store_at_the_same_place_is_refused(folder: Path) -> None:
    store = FileStore(f"file://{folder}")
    mine = identify(store)
    unmount(folder)
    theirs = identify(open_store(f"file://{folder}"))
    with pytest.raises(StoreError, match=f"its id is {theirs}, not {mine}"):
        store.put("a", b"1")
    with pytest.raises(StoreError, match=f"its id is {theirs}, not {mine}"):
        check_identity(open_store(f"file://{folder}"), mine)
    assert os.listdir(folder) == [IDENTITY]


def test_a_store_without_an_id_goes_on_and_gets_none_by_a_write(folder: Path) -> None:
    store = open_store(f"file://{folder}")
    store.put("a", b"1")
    assert identity_of(store) == ""
    with pytest.raises(StoreError, match="is it mounted"):
        check_identity(store, "of-a-run")


def test_a_damaged_id_is_said(folder: Path) -> None:
    identify(open_store(f"file://{folder}"))
    (folder / IDENTITY).write_text("[" * 100_000)
    with pytest.raises(StoreError, match=f"{IDENTITY} does not say which store this is"):
        open_store(f"file://{folder}")


def test_what_killed_writes_left_goes_when_it_is_old(folder: Path) -> None:
    store = FileStore(f"file://{folder}")
    store.put("runs/a/x", b"1")
    names = [f".x.{'0' * 31}{number}.tmp" for number in range(2)]
    for name in (*names, ".mine.tmp"):
        (folder / "runs" / "a" / name).write_bytes(b"half")
    old = time.time() - 7200
    for name in (names[0], ".mine.tmp"):
        os.utime(folder / "runs" / "a" / name, (old, old))
    assert sweep(store, "runs") == 1
    assert sorted(os.listdir(folder / "runs" / "a")) == sorted([names[1], ".mine.tmp", "x"])
    assert sweep(store, "runs", file_grace_s=-60.0) == 1
    assert sweep(store, "nothing") == 0


def test_folders_that_a_store_makes_are_private(folder: Path) -> None:
    store = open_store(f"file://{folder}/deep")
    store.put("runs/a/x", b"1")
    for made in (folder, folder / "deep", folder / "deep" / "runs" / "a"):
        assert made.stat().st_mode & 0o777 == 0o700
