"""Each start has a number of its own, the newest fences the others, and markers do not pile up."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from infra.epochs import Epoch, Replaced, begin
from infra.stores.opening import open_store
from infra.stores.store import Store, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}")


def test_the_newest_start_fences_the_others(store: Store) -> None:
    first = begin(store, "r-1", "trainer")
    first.check()
    second = begin(store, "r-1", "trainer")
    second.check()
    begin(store, "r-1", "feeder").check()
    with pytest.raises(Replaced, match=r"start 1 of the trainer \(process \d+ on .*\) has replaced this one"):
        first.check()


def test_starts_at_once_get_numbers_of_their_own(store: Store) -> None:
    found: list[Epoch] = []
    threads = [
        threading.Thread(target=lambda: found.append(begin(store, "r-1", "trainer"))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.number for one in found) == list(range(6))


def test_markers_do_not_pile_up(store: Store) -> None:
    starts = [begin(store, "r-1", "trainer") for _ in range(120)]
    assert [one.number for one in starts] == list(range(120))
    assert len(store.list("runs/r-1/trainers")) <= 8
    starts[-1].check()
    with pytest.raises(Replaced):
        starts[0].check()


def test_a_store_that_is_another_one_is_noticed(store: Store, tmp_path: Path) -> None:
    start = begin(store, "r-1", "trainer")
    store.delete("runs/r-1/trainers/e00.json")
    with pytest.raises(Replaced, match=r"e00\.json is gone"):
        start.check()


def test_rubbish_among_the_markers_stops_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("e.json", "x", "e1/e2.json", "exx.json"):
        store.put(f"runs/r-1/trainers/{name}", b"rubbish")
    start = begin(store, "r-1", "trainer")
    assert start.number == 0
    store.put("runs/r-1/trainers/e03.json", b"[")
    with pytest.raises(Replaced, match="start 3 of the trainer has replaced"):
        start.check()

    def fails(prefix: str) -> list[str]:
        raise StoreError("no answer")

    monkeypatch.setattr(store, "list", fails)
    start.check()  # nothing is known: the ledger's own rule holds all the same
