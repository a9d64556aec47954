"""Machines that joined a run: they stay while it is paused or taken up again, and leave when it is over."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.balancing.keeper import BalanceBook
from flows.run import joining, run_outlook, watching_balance
from flows.run.commands import GENERATOR, Worker
from flows.run.gpu_claims import GpuClaims
from flows.run.joining import Joining, take_part
from flows.run.request import RunFailed
from flows.run.run_outlook import BACK_S, RunOutlook
from flows.run.run_state import SILENT_S, RunState
from flows.run.supervision import RunProcesses
from flows.run.watching_balance import NewestActs, keep_balanced
from flows.view.follow import Follower
from infra import runs
from infra.epochs import Replaced
from infra.memory_bus import MemoryBus
from infra.runs import RunRecord
from infra.stores.opening import open_store
from infra.stores.store import Store
from schemas.balancing import BalanceSection
from schemas.messages import Heartbeat
from schemas.runspec import RunSpec
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


def record_of(spec: RunSpec) -> RunRecord:
    return RunRecord(id="test-1", spec=spec, bootstrap_servers="k", store="", model="m", created_at=0.0)


class Watched:
    """An outlook, and a clock that goes on by hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(run_outlook, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.store = open_store(f"file://{folder}")
        self.outlook = RunOutlook(self.store, record_of(make_spec()))

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
    assert watched.after(0.0) == (False, False)
    assert watched.after(BACK_S - 1.0) == (False, False)
    assert watched.after(2.0) == (True, False)
    watched.outlook.hear([beat("starting")])
    assert watched.after(1000.0) == (False, False)


def test_a_run_whose_flow_lives_is_not_over_before_it_is_trained(watched: Watched) -> None:
    """The last checkpoint of a large model takes minutes, and its ranks write it, when no feeder is left."""
    watched.outlook.hear([beat("ended")])
    for _ in range(10):
        write_state(watched.store, "training", at=watched.now)
        assert watched.after(SILENT_S) == (False, False)
    write_state(watched.store, "reporting", trained=True)
    assert watched.after(2.0) == (True, False)


def test_a_flow_that_comes_back_late_has_time_to_start_its_feeder(watched: Watched) -> None:
    write_state(watched.store, "training")
    watched.outlook.hear([beat("ended")])
    assert watched.after(BACK_S - 1.0) == (False, False)
    write_state(watched.store, "starting", started_at=1.0)
    assert watched.after(2.0) == (False, False)
    assert watched.after(BACK_S - 2.0) == (False, False)
    watched.outlook.hear([beat("starting")])
    assert watched.after(1000.0) == (False, False)


def test_an_offline_run_is_over_with_its_trainer(watched: Watched) -> None:
    spec = make_spec(algorithm={"mode": "offline", "recorded": "other-1"})
    watched.outlook = RunOutlook(watched.store, record_of(spec))
    write_state(watched.store, "training")
    watched.outlook.hear([beat("training", "trainer")])
    assert watched.after(1000.0) == (False, False)
    watched.outlook.hear([beat("ended", "trainer")])
    write_state(watched.store, "paused")
    assert watched.after(2.0) == (False, True)
    write_state(watched.store, "ended")
    assert watched.after(2.0) == (True, False)


@pytest.mark.parametrize(("progress_s", "patience_s"), [(600, 3600), (1200, 4800)])
def test_a_run_that_says_nothing_for_long_is_lost(watched: Watched, progress_s: int, patience_s: int) -> None:
    """Ranks that wait for its trainer die thrice an hour, which is allowed, and are started again."""
    watched.outlook = RunOutlook(watched.store, record_of(make_spec(deadlines={"progress_s": progress_s})))
    watched.outlook.hear([beat("feeding")])
    for _ in range(8):
        watched.now += (patience_s - 8) / 8
        watched.outlook.hear([beat("waiting for the trainer", "rank"), beat("feeding")])  # an old one
        watched.outlook.check_heard()
    watched.now += 16
    with pytest.raises(RunFailed, match=rf"said nothing for {patience_s // 60} minutes: they were killed"):
        watched.outlook.check_heard()
    watched.outlook.hear([beat("training", "trainer")])
    watched.outlook.check_heard()
    watched.outlook.hear([beat("ended")])  # a pause may last as long as it likes
    watched.now += 10 * patience_s
    watched.outlook.check_heard()


class Counted:
    """Remembers changes."""

    acts = True

    def __init__(self) -> None:
        self.changes: list[int] = []

    def grow(self) -> None:
        self.changes.append(1)

    def shrink(self) -> None:
        self.changes.append(-1)


class LiveRun:
    """A run on a bus of its own, whose feeder is heard by hand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
        monkeypatch.setenv("STREAMRL_HOME", str(folder))
        self.store, self.bus = open_store(f"file://{folder}/store"), MemoryBus()
        spec = make_spec(report=str(folder), **sections)
        self.record = runs.create(self.store, spec, bootstrap_servers="k", model="m", run_id="test-1")
        self._topics = Topics(self.record.id, spec.lengths.classes)
        self.bus.create_topics(self._topics.all())
        self._writer = self.bus.writer()
        monkeypatch.setattr(joining, "connect", lambda *_: self.bus)
        self.hear("feeding")

    def hear(self, state: str) -> None:
        self._writer.send(self._topics.status, encode(beat(state)), key="feeder-0")
        self._writer.flush(10.0)

    def joined(self) -> Joining:
        idle = [sys.executable, "-c", "import time; time.sleep(600)"]
        return Joining(self.record, [Worker("generator-7", GENERATOR, idle, {})], GpuClaims())


@contextmanager
def in_thread(work: Callable[[], object], end: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join(60)
    assert not thread.is_alive()


def test_processes_that_joined_end_in_a_pause_and_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = LiveRun(tmp_path, monkeypatch), list[str]()
    with in_thread(lambda: take_part(run.joined(), said.append), lambda: write_state(run.store, "ended")):
        wait_until(lambda: len(said) == 1, what="a generator")
        run.hear("ended")
        write_state(run.store, "paused")
        wait_until(lambda: "is paused" in said[-1], what="the pause")
        write_state(run.store, "training")
        wait_until(lambda: len(said) == 3 and "generator-7 is process" in said[-1], what="a new start")
        run.hear("starting")
        run.hear("ended")
    assert len(said) == 3


def test_processes_that_joined_end_when_the_run_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_outlook, "LOST_S", 1.0)
    run = LiveRun(tmp_path, monkeypatch, deadlines={"progress_s": 0.1})
    with pytest.raises(RunFailed, match="feeder and trainer of run test-1 have said nothing for"):
        take_part(run.joined(), lambda _: None)


def test_a_balance_from_elsewhere_waits_through_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generators end meanwhile, and start again."""
    run, said, crews = LiveRun(tmp_path, monkeypatch), list[str](), list[RunProcesses]()
    (worker,) = run.joined().workers

    def crew_of(*given: Any, **options: Any) -> RunProcesses:
        crews.append(RunProcesses(*given, **options))
        crews[0].add(worker)
        return crews[0]

    monkeypatch.setattr(watching_balance, "RunProcesses", crew_of)
    monkeypatch.setattr(watching_balance, "BalanceBook", partial(BalanceBook, connected=lambda *_: run.bus))
    monkeypatch.setattr(watching_balance, "Follower", partial(Follower, connected=lambda *_: run.bus))
    rule = BalanceSection(most=2)

    def balance() -> None:
        keep_balanced(run.record, rule, store=run.store.url, say=said.append, decided_by="a test")

    def running() -> bool:
        return bool(crews and crews[0]._team.running)

    with in_thread(balance, lambda: write_state(run.store, "ended")):
        wait_until(running, what="a generator")
        write_state(run.store, "paused")
        run.hear("ended")
        wait_until(lambda: not running(), what="its end in the pause")
        assert said == ["run test-1 is paused: its balance waits until it goes on"]
        write_state(run.store, "training")
        wait_until(running, what="a new start")
        run.hear("starting")
        run.hear("ended")
    assert len(said) == 1


def test_the_newest_balance_from_elsewhere_acts_alone(tmp_path: Path) -> None:
    store, staff = open_store(f"file://{tmp_path}"), Counted()
    first = NewestActs(staff, store, "test-1")
    first.grow()
    second = NewestActs(staff, store, "test-1")
    for act in (first.grow, first.shrink):
        with pytest.raises(Replaced, match=r"start 1 of the balancer .* has replaced this one"):
            act()
    second.shrink()
    assert staff.changes == [1, -1]
