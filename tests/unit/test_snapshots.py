"""A feeder's snapshots: whole or passed over, few, and never in the feeder's way."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import Explained
from infra.stores.file_store import FileStore
from infra.stores.opening import open_store
from infra.stores.store import StoreError
from producers import snapshots
from producers.snapshots import (
    Announced,
    Began,
    FeederSnapshot,
    Keeper,
    Lot,
    Opened,
    OpenEvaluation,
    PlannerState,
    Snapshots,
    lowest,
    packed_snapshot,
    unpacked_snapshot,
)  # fmt: skip
from tests.waiting import wait_until

FLOATS = st.floats(allow_nan=False)


def snapshot(version: int = 3, **fields: Any) -> FeederSnapshot:
    lot = Lot(version=version, first=8, predicted=[1.5, 2.5], predictor="none/3", edges=[float("inf")])
    values: dict[str, Any] = {
        "run": "test-1", "epoch": 2, "planner": PlannerState(version=version, edges=[5.0], lots=[lot]),
        "ledger": version, "began": {1: Began(step=1, position=4)}, "samples": {0: 7},
        "samples_of": {2: {1: 9}},
        "iterations": {3: Opened(prompts={0: 3, 1: 4}, dead=5)}, "ends": Opened(prompts={0: 9, 1: 9}, dead=9),
        "evals": 1, "evaluated": [3], "announced": Announced(predictor="none/3", edges=[5.0]),
        "evaluations": [
            OpenEvaluation(version=2, opened=Opened(prompts={0: 1, 1: 8}, dead=2), samples={0: 4})
        ],
    }  # fmt: skip
    return FeederSnapshot(**{**values, **fields})


@given(st.lists(FLOATS, max_size=5), st.integers(0, 10**6))
def test_what_is_put_comes_back(edges: list[float], version: int) -> None:
    one = snapshot(planner=PlannerState(version=version, edges=edges, recent=edges))
    assert unpacked_snapshot(packed_snapshot(one), "here") == one


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_one_changed_byte_is_found(place: int, change: int) -> None:
    data = bytearray(packed_snapshot(snapshot()))
    data[place % len(data)] ^= change
    try:
        found = unpacked_snapshot(bytes(data), "here")
    except ValueError:
        return
    assert found == snapshot(), "a byte that means nothing: a space, or the case of an escape"


def test_it_is_read_from_where_the_oldest_open_thing_begins() -> None:
    one = snapshot()
    assert one.opened() == Opened(prompts={0: 1, 1: 4}, dead=2)
    assert snapshot(iterations={}, evaluations=[]).opened() == one.ends
    assert lowest([{0: 3, 1: 2}, {0: 1}]) == {0: 1}, "a partition that one does not name begins at its start"


def test_the_newest_that_fits_is_taken_and_few_are_kept(tmp_path: Path) -> None:
    store, warned = open_store(f"file://{tmp_path}"), list[str]()
    ours = Snapshots(store, "test-1", warned.append)
    for version in range(6):
        ours.put(snapshot(version))
    ours.put(snapshot(5))
    keys = store.list("runs/test-1/feeder")
    assert [key.rpartition("/")[2] for key in keys] == [f"0000000{number}-02.json" for number in (3, 4, 5)]
    store.put("runs/test-1/feeder/note.txt", b"somebody's")
    store.put("runs/test-1/feeder/sub/00000009-01.json", b"somebody's")
    store.put(keys[2], store.get(keys[2])[:-9])
    store.put("runs/test-1/feeder/00000007-02.json", packed_snapshot(snapshot(7, run="other-1")))
    found = Snapshots(store, "test-1", warned.append).newest(
        lambda one: "it is too new" if one.planner.version == 4 else ""
    )
    assert found is not None and found.planner.version == 3
    assert [
        words in text
        for words, text in zip(("of run other-1", "no snapshot", "too new"), warned, strict=True)
    ]
    Snapshots(store, "test-1", warned.append).put(snapshot(8))
    assert len([key for key in store.list("runs/test-1/feeder") if key.endswith("-02.json")]) == 3


def test_with_keys_one_that_nobody_signed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    raw = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "a.pem").write_bytes(raw)
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "a.pub").write_bytes(public)
    plain = packed_snapshot(snapshot())
    monkeypatch.setenv("STREAMRL_SIGNING_KEY", str(tmp_path / "a.pem"))
    monkeypatch.setenv("STREAMRL_TRUSTED_KEYS", str(tmp_path / "a.pub"))
    assert unpacked_snapshot(packed_snapshot(snapshot()), "here") == snapshot()
    with pytest.raises(Explained, match="not signed"):
        unpacked_snapshot(plain, "here")


def test_putting_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs delays nothing, one that fails is said; the newest is put when it can be."""
    monkeypatch.setattr(snapshots, "_LEAST_S", 0.0)
    go, asked, warned = threading.Event(), threading.Event(), list[str]()
    plain = FileStore.put

    def slow(store: FileStore, key: str, data: bytes) -> None:
        asked.set()
        go.wait(20)
        if "00000000" in key:
            raise StoreError("no room")
        plain(store, key, data)

    monkeypatch.setattr(FileStore, "put", slow)
    store = open_store(f"file://{tmp_path}")
    keeper = Keeper(Snapshots(store, "test-1", warned.append), warned.append).open()
    keeper.offer(snapshot(0))
    wait_until(asked.is_set, what="the first one")
    for version in random.Random(0).sample(range(1, 50), 20):
        keeper.offer(snapshot(version))
    keeper.offer(snapshot(60))
    go.set()
    keeper.close()
    assert [key[-16:] for key in store.list("runs/test-1/feeder")] == ["00000060-02.json"]
    assert "iteration 0 can't be stored: no room" in warned[0]
