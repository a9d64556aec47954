"""The state of a run in the store: runs, stop and status read it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import TerminationSignal
from typer.testing import CliRunner

from flows.cli import app
from flows.run import run_state
from flows.run.request import LastingFailure, RunCancelled, RunFailed
from flows.run.run_state import RunState, StateKeeper, ask_to_stop, read_state, read_states
from flows.view.run_view import RunView
from infra.runs import RunRecord
from infra.stores.opening import open_store
from infra.stores.store import Store, StoreError
from tests.factories import make_context, make_spec
from tests.feeding import make_step
from tests.waiting import wait_until

SPEC = make_spec()
GO_ON = "go on with the run: streamrl run test.yaml --resume test-1"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRecord:
    monkeypatch.setattr(run_state, "LOOK_EVERY_S", 0.05)
    monkeypatch.setenv("STREAMRL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    record = make_context(SPEC, tmp_path).record
    open_store(record.store).put("runs/test-1/run.json", record.model_dump_json().encode())
    return record


def store_of(record: RunRecord) -> Store:
    return open_store(record.store)


def invoke(record: RunRecord, *words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--store", record.store])
    return f"{result.exit_code} {result.output}"


def test_a_run_says_how_far_it_is_and_how_it_ended(record: RunRecord) -> None:
    store = store_of(record)
    view = RunView(record.id, SPEC)
    view.take(make_step(SPEC, 1, [], run="test-1", metrics={"reward": 0.5}))
    with StateKeeper(record, store, GO_ON) as keeper:
        wait_until(lambda: (s := read_state(store, "test-1")) and s.state == "starting", what="a state")
        keeper.show(view)
        keeper.phase("training")
        wait_until(lambda: (s := read_state(store, "test-1")) and s.state == "training", what="the phase")
        said = invoke(record, "runs")
        assert "test-1" in said and "training" in said and "2 of 3" in said
    found = read_state(store, "test-1")
    assert found is not None and (found.state, found.iteration, found.why) == ("ended", 1, "")
    assert "ended" in invoke(record, "runs")


@pytest.mark.parametrize(
    ("error", "state", "why"),
    [
        (RunFailed("the trainer died\nits log is …"), "failed", "the trainer died\nits log is …"),
        (RunCancelled("run test-1 was cancelled"), "interrupted", "run test-1 was cancelled"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C or a signal"),
        (TerminationSignal(signal=15), "interrupted", "Ctrl-C or a signal"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
    ],
)
def test_an_error_is_kept_with_what_to_do(
    record: RunRecord, error: BaseException, state: str, why: str
) -> None:
    with pytest.raises(type(error)), StateKeeper(record, store_of(record), GO_ON):
        raise error
    found = read_state(store_of(record), "test-1")
    assert found is not None and (found.state, found.why) == (state, why)
    assert found.go_on == GO_ON and found.report.endswith("runs/test-1")


def test_there_is_no_advice_to_resume_after_an_error_that_comes_again(record: RunRecord) -> None:
    with pytest.raises(LastingFailure), StateKeeper(record, store_of(record), GO_ON):
        raise LastingFailure("6 of the 8 samples have no reward")
    found = read_state(store_of(record), "test-1")
    assert found is not None and (found.state, found.go_on) == ("failed", "")
    assert found.why == "6 of the 8 samples have no reward"


def test_a_request_to_stop_is_seen_and_an_old_one_is_not(record: RunRecord) -> None:
    store = store_of(record)
    ask_to_stop(store, "test-1")
    with StateKeeper(record, store, GO_ON) as keeper:
        wait_until(lambda: read_state(store, "test-1") is not None, what="a state")
        assert not keeper.stop_asked
        stopped = threading.Event()
        said: list[str] = []
        thread = threading.Thread(
            target=lambda: (said.append(invoke(record, "stop", "test-1")), stopped.set())
        )
        thread.start()
        wait_until(lambda: keeper.stop_asked, what="the request")
        assert not stopped.is_set()
        with pytest.raises(RunCancelled), StateKeeper(record, store, GO_ON):
            raise RunCancelled("run test-1 was cancelled")
        thread.join(10)
    assert said == [f"0 run test-1: interrupted. To {GO_ON}\n"]
    assert not store.exists("runs/test-1/stop.json")
    assert invoke(record, "stop", "test-1") == "0 run test-1 does not go on: ended\n"


def test_a_flow_that_was_killed_is_silent(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "HEARD_WITHIN_S", 0.2)
    store = store_of(record)
    with StateKeeper(record, store, GO_ON):
        wait_until(lambda: read_state(store, "test-1") is not None, what="a state")
        old = json.loads(store.get("runs/test-1/state.json"))
    store.put("runs/test-1/state.json", json.dumps(old | {"at": time.time() - 600}).encode())
    assert "silent" in invoke(record, "runs") and "10 min ago" in invoke(record, "runs")
    for words in (["runs"], ["status", "test-1"]):
        assert run_state.SILENT_NOTE in invoke(record, *words)
    said = invoke(record, "stop", "test-1")
    assert said.startswith("1 run test-1 was last heard 10 min ago") and GO_ON in said
    assert "is gone, and its processes with it" in said
    # Without listening for long enough, the command can't say that it is gone.
    said = invoke(record, "stop", "test-1", "--wait", "0.1")
    assert said.startswith("1 run test-1 has not ended within 0.1 s") and "look whether it lives" in said
    store.delete("runs/test-1/stop.json")
    said = invoke(record, "stop", "test-1", "--wait", "0")
    assert said.startswith("0 run test-1 is asked to stop. It was last heard 10 min ago: look whether it")
    assert store.exists("runs/test-1/stop.json")


def test_a_run_on_a_machine_with_another_clock_is_stopped(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "SILENT_S", -1.0)  # as if this machine's clock were 91 s ahead
    monkeypatch.setattr(run_state, "WRITE_EVERY_S", 0.2)
    store, said = store_of(record), list[str]()
    with pytest.raises(RunCancelled), StateKeeper(record, store, GO_ON) as keeper:
        wait_until(lambda: (s := read_state(store, "test-1")) and s.now == "silent", what="a state")
        thread = threading.Thread(target=lambda: said.append(invoke(record, "stop", "test-1")))
        thread.start()
        wait_until(lambda: keeper.stop_asked or said, what="the request")
        raise RunCancelled("run test-1 was cancelled")
    thread.join(10)
    assert said == [f"0 run test-1: interrupted. To {GO_ON}\n"]


def test_a_flow_is_heard_again_only_by_what_it_writes(record: RunRecord) -> None:
    store, told = store_of(record), list[str]()
    with StateKeeper(record, store, GO_ON) as keeper:
        wait_until(lambda: read_state(store, "test-1") is not None, what="a state")
        before = read_state(store, "test-1")
        assert before is not None
        assert not run_state.is_heard_again(store, "test-1", before, 0.2, told.append)
        assert told and told[0].startswith("run test-1 looks silent: 0 s are left")
        keeper.phase("training")
        assert run_state.is_heard_again(store, "test-1", before, 30.0, told.append)


@pytest.mark.parametrize("state", [b"", b"{}", b"[" * 9999, b'{"state":"x"}', b"\xff" * 70_000])
def test_a_state_that_can_not_be_read_is_none(record: RunRecord, state: bytes) -> None:
    store_of(record).put("runs/test-1/state.json", state)
    assert read_states(store_of(record)) == {"test-1": None}
    assert "test-1" in invoke(record, "runs")


def test_a_store_that_is_away_ends_nothing(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(record)

    def away(*_: object) -> None:
        raise StoreError("the store is away")

    for name in ("put", "delete", "exists"):
        monkeypatch.setattr(store, name, away)
    with StateKeeper(record, store, GO_ON) as keeper:
        keeper.phase("training")
    assert read_state(store, "test-1") is None


def test_runs_are_listed_newest_first(record: RunRecord) -> None:
    store = store_of(record)
    for number, started in ((2, 30.0), (3, 20.0)):
        one = record.model_copy(update={"id": f"test-{number}"})
        store.put(f"runs/test-{number}/run.json", one.model_dump_json().encode())
        with StateKeeper(one, store, GO_ON):
            wait_until(lambda: read_state(store, f"test-{number}") is not None, what="a state")  # noqa: B023
        said = json.loads(store.get(f"runs/test-{number}/state.json"))
        store.put(f"runs/test-{number}/state.json", json.dumps(said | {"started_at": started}).encode())
    assert list(read_states(store)) == ["test-2", "test-3", "test-1"]
    lines = invoke(record, "runs", "--json")[2:].splitlines()
    assert [json.loads(line)["run"] for line in lines] == ["test-2", "test-3", "test-1"]
    assert "2 older; -n 3 shows all" in invoke(record, "runs", "-n", "1")


def test_a_phase_that_begins_while_the_state_is_written_is_kept(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = StateKeeper(record, store_of(record), GO_ON)
    begun, changed, plain = threading.Event(), threading.Event(), RunState.model_copy

    def slow(self: RunState, *, update: dict[str, Any]) -> RunState:
        found = plain(self, update=update)
        if "at" in update:  # the thread that writes
            begun.set()
            changed.wait(0.5)
        return found

    monkeypatch.setattr(RunState, "model_copy", slow)
    writing = threading.Thread(target=keeper._write)
    writing.start()
    assert begun.wait(10)
    keeper._change(state="reporting", trained=True)
    changed.set()
    writing.join(10)
    keeper._write()
    found = read_state(store_of(record), "test-1")
    assert found is not None and (found.state, found.trained) == ("reporting", True)
