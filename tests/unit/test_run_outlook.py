"""Machines that joined a run: they stay while it is paused or taken up again, and leave when it is over."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.run import joining, run_outlook
from flows.run.commands import GENERATOR, Worker
from flows.run.gpu_claims import GpuClaims
from flows.run.joining import Joining, take_part
from flows.run.run_outlook import BACK_S, RunOutlook
from flows.run.run_state import SILENT_S, RunState
from infra import runs
from infra.memory_bus import MemoryBus
from infra.stores.opening import open_store
from infra.stores.store import Store
from schemas.messages import Heartbeat
from schemas.topics import Topics
from schemas.wire import encode
from tests.factories import make_spec
from tests.fakes.fill import fill
from tests.waiting import wait_until


def write_state(store: Store, state: str, **fields: Any) -> None:
    said = {"at": time.time(), "started_at": 0.0, "host": "here", "pid": 1, "iterations": 3, **fields}
    found = RunState(run="test-1", state=state, **said)  # type: ignore[arg-type]
    store.put("runs/test-1/state.json", found.model_dump_json().encode())


def beat(state: str, role: str = "feeder") -> Heartbeat:
    return fill(Heartbeat, run="test-1", role=role, state=state)


class Watched:
    """An outlook, and a clock that goes on by hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(run_outlook, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.store = open_store(f"file://{folder}")
        self.outlook = RunOutlook(self.store, "test-1")

    def after(self, seconds: float) -> tuple[bool, bool]:
        """Whether the run is over, and whether it is paused, so many seconds later."""
        self.now += seconds
        return self.outlook.is_over(), self.outlook.is_paused()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_run_whose_feeder_lives_goes_on(watched: Watched) -> None:
    write_state(watched.store, "failed")  # of a start before
    watched.outlook.hear([beat("feeding")])
    assert watched.after(1000.0) == (False, False)


@pytest.mark.parametrize(
    ("state", "fields"),
    [("ended", {}), ("failed", {}), ("interrupted", {}), ("suspended", {}), ("reporting", {"trained": True})],
)
def test_a_run_that_has_ended_is_over_at_once(watched: Watched, state: str, fields: dict[str, Any]) -> None:
    write_state(watched.store, "training")
    watched.outlook.hear([beat("ended")])
    assert watched.after(2.0) == (False, False)
    write_state(watched.store, state, **fields)
    assert watched.after(2.0) == (True, False)


def test_a_run_without_a_state_is_over_with_its_feeder(watched: Watched) -> None:
    watched.outlook.hear([beat("ended")])
    assert watched.after(0.0) == (True, False)


def test_a_paused_run_is_waited_for_as_long_as_its_flow_lives(watched: Watched) -> None:
    watched.outlook.hear([beat("ended")])
    for _ in range(100):  # whatever the clock of the flow's machine says
        write_state(watched.store, "paused", at=watched.now)
        assert watched.after(SILENT_S / 2) == (False, True)
    write_state(watched.store, "training")
    assert watched.after(2.0) == (False, False)
    assert watched.after(BACK_S / 2) == (False, False), "its feeder starts"
    watched.outlook.hear([beat("starting")])
    assert watched.after(10 * BACK_S) == (False, False)
    watched.outlook.hear([beat("ended")])
    write_state(watched.store, "paused")
    assert watched.after(2.0) == (False, True)
    assert watched.after(SILENT_S + 2.0) == (True, False), "its flow is gone"


def test_a_flow_that_was_killed_may_come_back_soon(watched: Watched) -> None:
    write_state(watched.store, "training")
    watched.outlook.hear([beat("ended")])
    assert watched.after(BACK_S - 1.0) == (False, False)
    assert watched.after(2.0) == (True, False)
    watched.outlook.hear([beat("starting")])
    assert watched.after(1000.0) == (False, False)


def test_processes_that_joined_end_in_a_pause_and_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    store, bus = open_store(f"file://{tmp_path}/store"), MemoryBus()
    spec = make_spec(report=str(tmp_path))
    record = runs.create(store, spec, bootstrap_servers="k", model="m", run_id="test-1")
    topics = Topics(record.id, record.spec.lengths.classes)
    bus.create_topics(topics.all())
    writer = bus.writer()

    def hear(state: str) -> None:
        writer.send(topics.status, encode(beat(state)), key="feeder-0")
        writer.flush(10.0)

    hear("feeding")
    monkeypatch.setattr(joining, "connect", lambda *_: bus)
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    said: list[str] = []
    joined = Joining(record, [Worker("generator-7", GENERATOR, idle, {})], GpuClaims())
    thread = threading.Thread(target=lambda: take_part(joined, said.append))
    thread.start()
    try:
        wait_until(lambda: len(said) == 1, what="a generator")
        hear("ended")
        write_state(store, "paused")
        wait_until(lambda: "is paused" in said[-1], what="the pause")
        write_state(store, "training")
        wait_until(lambda: len(said) == 3 and "generator-7 is process" in said[-1], what="a new start")
        hear("starting")
        hear("ended")
    finally:
        write_state(store, "ended")
        thread.join(60)
    assert not thread.is_alive() and len(said) == 3
