"""A run is taken away whole: topics, objects, folders; never one that is alive, nor another's topics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.run import removing
from flows.run.removing import remains, remove
from flows.run.request import RunFailed
from flows.run.run_state import RunState
from infra import runs
from infra.files.locks import locked
from infra.memory_bus import MemoryBus
from infra.ownership import claim
from infra.runs import RunError, RunRecord
from infra.stores.opening import open_store
from infra.stores.store import IDENTITY, Store, StoreError
from schemas.messages import Heartbeat
from schemas.topics import Topics
from schemas.wire import encode
from tests.factories import make_spec

TOPICS = len(Topics("test-1", 2).all())


class Made:
    """Two runs, test-1 and test-10, with topics and objects."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bus = folder, MemoryBus()
        self.store: Store = open_store(f"file://{folder}/store")
        self.records = [self.make(run) for run in ("test-1", "test-10")]
        self.open: Callable[[RunRecord], MemoryBus] = lambda record: self.bus

    def make(self, run: str) -> RunRecord:
        spec = make_spec(report=str(self.folder / "runs"))
        record = runs.create(self.store, spec, bootstrap_servers="k", model="m", run_id=run)
        topics = Topics(run, 2)
        self.bus.create_topics(topics.all())
        claim(self.bus, record, topics)
        for number in range(40):
            self.store.put(f"runs/{run}/weights/chunks/{number:02d}", b"c")
        (self.folder / "store" / "runs" / run / f".x.{'0' * 32}.tmp").write_bytes(b"half")
        (self.folder / "runs" / run).mkdir(parents=True)
        return record

    def beat(self, state: str, *, ago_s: float = 0.0) -> None:
        beat = Heartbeat(
            run="test-1", role="trainer", number=0, pid=1, host="h", state=state, waits_for="",
            unblocked_by="", since=0.0, counters={}, sent_at=time.time() - ago_s,
        )  # fmt: skip
        self.bus.append(Topics("test-1", 2).status, 0, b"trainer-0", encode(beat))


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(removing, "LISTEN_S", 0.3)
    return Made(tmp_path)


def test_all_of_a_run_goes_and_nothing_else(made: Made) -> None:
    made.beat("ended")
    seen: list[tuple[int, int]] = []
    found = remains(made.store, "test-1", made.open)
    assert (len(found.topics), len(found.objects)) == (TOPICS, 41)
    remove(made.store, found, made.open, progress=lambda done, whole: seen.append((done, whole)))
    assert seen[-1] == (41, 41) and len(seen) == 41
    assert runs.runs_of(made.store) == ["test-10"]
    assert {name.partition(".")[0] for name in made.bus.topic_names()} == {"test-10"}
    assert len(made.bus.topic_names()) == TOPICS
    assert os.listdir(made.folder / "store" / "runs") == ["test-10"]
    assert len(made.store.list("runs/test-10")) == 41
    assert (made.folder / "runs" / "test-1").is_dir(), "the report is asked for by itself"
    assert not remains(made.store, "test-1", made.open)
    assert made.store.exists(IDENTITY)


def test_the_report_goes_if_that_is_asked_for(made: Made) -> None:
    remove(made.store, remains(made.store, "test-1", made.open), made.open, report=True)
    assert os.listdir(made.folder / "runs") == ["test-10"]


def test_a_run_that_beats_is_not_removed(made: Made) -> None:
    made.beat("training")
    with pytest.raises(RunFailed, match="run test-1 is going on: trainer-0 still send heartbeats"):
        remains(made.store, "test-1", made.open)


@pytest.mark.parametrize("topics", [True, False])
def test_a_run_whose_flow_lives_elsewhere_is_not_removed(
    made: Made, topics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it is paused: then no process of it sends heartbeats."""
    monkeypatch.setattr(removing, "HEARD_WITHIN_S", 30.0)
    state = RunState(run="test-1", state="paused", at=1.0, started_at=0.0, host="far", pid=1, iterations=3)

    def write(text: str = "") -> None:
        state.at += 1.0
        made.store.put("runs/test-1/state.json", state.model_dump_json().encode())

    write()
    with pytest.raises(RunFailed, match=r"run test-1 is going on at far: stop it first \(streamrl stop"):
        remains(made.store, "test-1", made.open if topics else None, write)
    monkeypatch.setattr(removing, "HEARD_WITHIN_S", 0.2)
    assert remains(made.store, "test-1", made.open if topics else None), "its flow was killed"


def test_a_run_whose_processes_were_killed_long_ago_is_removed(made: Made) -> None:
    made.beat("training", ago_s=3600.0)
    assert remains(made.store, "test-1", made.open).topics


def test_a_run_that_a_flow_holds_is_not_removed(made: Made) -> None:
    found = remains(made.store, "test-1", made.open)
    lock = made.folder / "runs" / "test-1" / ".lock"
    with locked(lock, what="it", deadline_s=0), pytest.raises(RunFailed, match="test-1 is going on"):
        remove(made.store, found, made.open)
    assert runs.runs_of(made.store) == ["test-1", "test-10"]


def test_a_removal_that_was_killed_goes_on(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    found, deleted = remains(made.store, "test-1", made.open), type(made.store).delete

    def dying(store: Store, key: str) -> None:
        if key.endswith("/20"):
            raise StoreError("the network is gone")
        deleted(store, key)  # type: ignore[arg-type]

    monkeypatch.setattr(type(made.store), "delete", dying)
    with pytest.raises(StoreError, match="the network is gone"):
        remove(made.store, found, made.open)
    monkeypatch.undo()
    monkeypatch.setattr(removing, "LISTEN_S", 0.1)
    again = remains(made.store, "test-1", made.open)
    assert again.record is not None and again.objects and not again.topics
    remove(made.store, again, made.open)
    assert runs.runs_of(made.store) == ["test-10"]


def test_topics_of_another_stores_run_stay(made: Made, tmp_path: Path) -> None:
    other = open_store(f"file://{tmp_path}/other")
    runs.create(other, make_spec(), bootstrap_servers="k", model="m", run_id="test-1")
    found = remains(other, "test-1", made.open)
    assert (found.foreign, found.topics) == (made.store.url, [])
    remove(other, found, made.open)
    assert not other.list("runs")
    assert len(made.bus.topic_names()) == 2 * TOPICS


@pytest.mark.parametrize("run", ["..", "", ".", "test-1/weights", "../runs/test-1", "*"])
def test_what_is_no_id_of_a_run_is_refused(made: Made, run: str) -> None:
    with pytest.raises(RunError, match="is no id of a run"):
        remains(made.store, run, made.open)
    assert len(made.store.list("runs")) == 82


def test_the_command_asks_and_says_when_there_is_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.run_bus.connect", lambda record, name: made.bus)
    words, cli = ["rm", "test-1", "--store", made.store.url], CliRunner()
    refused = cli.invoke(app, words, input="n\n")
    assert refused.exit_code == 2 and f"{TOPICS} topics, 41 objects" in refused.output
    assert runs.runs_of(made.store) == ["test-1", "test-10"]
    done = cli.invoke(app, [*words, "--yes"])
    assert done.exit_code == 0 and "run test-1 is gone" in done.output and "its report stays" in done.output
    again = cli.invoke(app, [*words, "--yes"])
    assert again.exit_code == 0 and "there is nothing of run test-1" in again.output


def test_a_run_whose_record_is_unreadable_goes_without_its_topics(made: Made) -> None:
    made.store.put("runs/test-1/run.json", b"{")
    with pytest.raises(
        RunError, match=r"is not a run record.*--no-topics removes the objects of the run without them"
    ):
        remains(made.store, "test-1", made.open)
    remove(made.store, remains(made.store, "test-1", None), None)
    assert runs.runs_of(made.store) == ["test-10"]
    assert len(made.bus.topic_names()) == 2 * TOPICS
