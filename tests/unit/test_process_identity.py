"""A process of a run starts only with the store and the topics that are the run's own."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import runs
from infra.memory_bus import MemoryBus
from infra.ownership import claim
from infra.roles.entry import DONE, FAILED, LASTING, run_role
from infra.stores.opening import open_store
from infra.stores.store import IDENTITY
from schemas.topics import Topics
from tests.factories import make_spec


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBus]:
    made = MemoryBus()
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name, *, patient, stop: made)
    log = logging.getLogger("streamrl")
    before = log.handlers[:], log.level, log.propagate
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)
    log.handlers[:], log.level, log.propagate = before
    gc.enable()


def make(folder: Path, bus: MemoryBus) -> runs.RunRecord:
    """A run test-1 in a store of its own, on the one broker."""
    store = open_store(f"file://{folder}/store")
    record = runs.create(store, make_spec(), bootstrap_servers="k", model="m", run_id="test-1")
    bus.create_topics(Topics(record.id, 2).all())
    return record


def start(record: runs.RunRecord) -> tuple[int, list[str]]:
    """The exit code, and which bodies ran."""
    began: list[str] = []
    words = ["--store", record.store, "--run", record.id]
    return run_role("trainer", lambda context: began.append(context.run), words), began


def test_its_own_are_fine(tmp_path: Path, bus: MemoryBus) -> None:
    record = make(tmp_path, bus)
    assert start(record) == (DONE, ["test-1"])
    claim(bus, record, Topics(record.id, 2))
    assert start(record) == (DONE, ["test-1"])


def test_another_stores_run_of_the_same_name_does_not_start(
    tmp_path: Path, bus: MemoryBus, capfd: pytest.CaptureFixture[str]
) -> None:
    mine, theirs = make(tmp_path / "mine", bus), make(tmp_path / "theirs", bus)
    claim(bus, mine, Topics(mine.id, 2))
    assert start(theirs) == (LASTING, [])
    assert f"those of another run test-1, in the store {mine.store}" in "".join(capfd.readouterr())
    assert start(mine) == (DONE, ["test-1"])


def test_nothing_starts_on_another_store(
    tmp_path: Path, bus: MemoryBus, capfd: pytest.CaptureFixture[str]
) -> None:
    record = make(tmp_path, bus)
    (tmp_path / "store" / IDENTITY).unlink()
    assert start(record) == (FAILED, [])
    assert "is not the one that this run began in: is it mounted?" in "".join(capfd.readouterr())
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert start(record) == (FAILED, [])
    assert "whether the store is mounted" in "".join(capfd.readouterr())
    assert not (tmp_path / "store").exists()
