"""The list of records that a run goes on past, and positions that retention has taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import skipped as module
from infra.bus import BusError, Record, clamp
from infra.memory_bus import MemoryBus
from infra.skipped import SkipError, add_skipped, parsed_place, place_of, skipped
from infra.stores.opening import open_store
from schemas.topics import Topic


def test_what_is_on_the_list_is_passed_over(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")
    assert skipped(store, "r-1") == frozenset()
    place = parsed_place("r-1.ledger[0]@17")
    for _ in range(2):
        add_skipped(store, "r-1", place, "unreadable")
    assert skipped(store, "r-1") == {("r-1.ledger", 0, 17)}
    assert skipped(store, "r-2") == frozenset()
    records = [Record("r-1.ledger", 0, offset, b"", b"") for offset in (16, 17, 18)]
    places = skipped(store, "r-1")
    assert [one.offset for one in records if place_of(one) not in places] == [16, 18]


def test_the_list_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}")
    monkeypatch.setattr(module, "_MOST", 3)
    for offset in range(3):
        add_skipped(store, "r-1", ("t", 0, offset), "")
    with pytest.raises(SkipError, match="names 3 records already"):
        add_skipped(store, "r-1", ("t", 0, 3), "")


@pytest.mark.parametrize("raw", [b"", b"[1]", b"\xff", b'{"records": [{"topic": 3}]}', b"[" * 100_000])
def test_a_list_that_can_not_be_read_is_named(tmp_path: Path, raw: bytes) -> None:
    store = open_store(f"file://{tmp_path}")
    store.put("runs/r-1/skipped.json", raw)
    with pytest.raises(SkipError, match=r"r-1/skipped\.json is no list of records to skip"):
        skipped(store, "r-1")


def test_a_list_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"file://{tmp_path}")
    add_skipped(store, "r-1", ("t", 0, 1), "unreadable")
    monkeypatch.setattr(module, "_LARGEST", 20)
    with pytest.raises(SkipError, match="it has more than 20 bytes"):
        skipped(store, "r-1")


@pytest.mark.parametrize("text", ["", "ledger", "a[0]", "a[x]@1", "a[0]@-1", "a b[0]@1", f"a[0]@{'9' * 30}"])
def test_a_place_has_a_form(text: str) -> None:
    with pytest.raises(SkipError, match="is no place of a record"):
        parsed_place(text)


def test_a_reader_goes_on_where_records_are_kept() -> None:
    bus, topic = MemoryBus(), Topic("t", 2)
    bus.create_topics([topic])
    for number in range(20):
        bus.writer().send(topic, b"", key="", partition=number % 2)
    bus.truncate(topic, 0, 7)
    reader = bus.reader(topic, {0: 3, 1: 4})
    with pytest.raises(BusError, match=r"t\[0\]@3 is gone"):
        reader.poll(0)
    assert clamp(reader) == {0: 4}
    assert reader.positions() == {0: 7, 1: 4}
    assert len(reader.poll(0)) == 3 + 6
    assert clamp(bus.reader(topic)) == {}
