"""`streamrl join --wait` and `--newest`: machines that join a run before it is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.run import awaited_run as module
from flows.run.awaited_run import awaited_run
from flows.run.request import RunFailed
from flows.run.run_state import Phase, RunState
from infra.runs import RunError, create
from infra.stores.opening import open_store
from infra.stores.store import Store, StoreError
from tests.factories import make_spec
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, at which is looked often."""
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_LIST_S", 0.01)
    monkeypatch.setattr(module, "HEARD_WITHIN_S", 0.2)
    return open_store(f"file://{tmp_path}/store")


def make(store: Store, run: str) -> None:
    create(store, make_spec(), bootstrap_servers="none", model="m", run_id=run)


def write(store: Store, run: str, state: Phase, *, ago_s: float = 0.0, trained: bool = False) -> None:
    """The state of a run, as its flow wrote it so many seconds ago."""
    said = RunState(
        run=run, state=state, at=time.time() - ago_s, started_at=0.0, host="here", pid=1, iterations=3,
        trained=trained, go_on=f"go on with the run: streamrl run f.yaml --resume {run}",
    )  # fmt: skip
    store.put(f"runs/{run}/state.json", said.model_dump_json().encode())


class Waiting:
    """A wait in a thread: its looks, its words, and the run that it found."""

    def __init__(self, store: Store, run: str, *, newest: bool) -> None:
        self.looks, self.said, self.found = 0, list[str](), list[str]()
        self._store, self._run, self._newest = store, run, newest

    def work(self) -> None:
        self.found.append(
            awaited_run(
                self._run, store=self._store.url, wait_s=150, newest=self._newest, say=self.said.append
            )
        )

    def looks_on(self) -> None:
        """Return when it has looked at all that was there before this call, and found nothing."""
        before = self.looks
        wait_until(lambda: self.found or self.looks > before + 1, what="two looks")
        assert not self.found


@pytest.fixture
def waiting(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    looks = module._Looks.look

    @contextmanager
    def begin(run: str, *, newest: bool = False) -> Iterator[Waiting]:
        one = Waiting(store, run, newest=newest)

        def counted(self: module._Looks) -> str | None:
            found = looks(self)
            one.looks += 1
            return found

        monkeypatch.setattr(module._Looks, "look", counted)
        thread = threading.Thread(target=one.work, daemon=True)
        thread.start()
        wait_until(lambda: one.looks, what="the first look")
        yield one
        wait_until(lambda: one.found, what="the run")
        thread.join(60)

    return begin


def test_a_run_is_waited_for_until_its_flow_has_begun(store: Store, waiting: Callable[..., Any]) -> None:
    with waiting("test-1") as one:
        one.looks_on()
        make(store, "test-1")  # its topics come after it, and a state comes after those
        one.looks_on()
        write(store, "test-1", "starting")
    assert one.found == ["test-1"]
    assert one.said == [f"waiting up to 150 s for run test-1 in {store.url} to go on"]


def test_a_run_that_goes_on_is_not_waited_for(store: Store) -> None:
    write(store, "test-1", "paused")
    said: list[str] = []
    assert awaited_run("test-1", store=store.url, wait_s=150, say=said.append) == "test-1"
    assert awaited_run("test-2", store=store.url, wait_s=0, say=said.append) == "test-2", "as without a wait"
    assert not said


@pytest.mark.parametrize("state", ["ended", "failed", "interrupted", "suspended", "reporting", "training"])
def test_a_run_that_was_there_before_is_waited_for_until_it_is_resumed(
    state: Phase, store: Store, waiting: Callable[..., Any]
) -> None:
    """Training, but not heard for long: it was killed, or its machine has another clock."""
    make(store, "test-1")
    write(store, "test-1", state, ago_s=3600, trained=state == "reporting")
    with waiting("test-1") as one:
        one.looks_on()
        write(store, "test-1", "starting", ago_s=1800)
    assert one.found == ["test-1"]


def test_the_newest_run_is_the_next_one_if_the_last_has_ended_or_was_killed(
    store: Store, waiting: Callable[..., Any]
) -> None:
    for run in ("test-9", "test-10", "other-11"):
        make(store, run)
        write(store, run, "training")  # a moment ago: it may still be alive
    with waiting("test", newest=True) as one:
        one.looks_on()
        make(store, "test-11")
        one.looks_on()
        write(store, "test-11", "starting")
    assert one.found == ["test-11"]
    assert one.said == [f"waiting up to 150 s for the newest run of the name test in {store.url} to go on"]


def test_the_newest_run_is_the_one_that_is_there_if_its_flow_is_heard(
    store: Store, waiting: Callable[..., Any]
) -> None:
    make(store, "test-10")
    write(store, "test-10", "training", ago_s=5.0)
    with waiting("test", newest=True) as one:
        one.looks_on()
        write(store, "test-10", "training")
    assert one.found == ["test-10"]


def test_a_store_that_is_away_may_be_back_soon(
    store: Store, waiting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreError("the store is away")

    read = module.read_state
    monkeypatch.setattr(module, "read_state", away)
    with pytest.raises(StoreError, match=r"the store is away \(waited 0.1 s for it\)"):
        awaited_run("test-1", store=store.url, wait_s=0.1, say=print)
    with waiting("test-1") as one:
        one.looks_on()
        write(store, "test-1", "training")
        monkeypatch.setattr(module, "read_state", read)
    assert one.found == ["test-1"]


def test_a_wait_in_vain_says_as_without_a_wait_and_how_long_it_was(store: Store) -> None:
    def ends(run: str, *, newest: bool = False) -> str:
        with pytest.raises((RunError, RunFailed)) as found:
            awaited_run(run, store=store.url, wait_s=0.1, newest=newest, say=print)
        return str(found.value)

    assert ends("test-7").startswith(f"there is no run test-7 in {store.url}; the newest there: none.")
    assert ends("test-7").endswith("--store names another store (waited 0.1 s for it)")
    assert "there is no run of the name test in" in (said := ends("test", newest=True))
    assert said.endswith("(waited 0.2 s for it)"), "at least until a flow that lives would have been heard"
    make(store, "test-7")
    assert ends("test-7") == ("run test-7 does not go on, its state is not written yet (waited 0.1 s for it)")
    write(store, "test-7", "failed")
    assert ends("test", newest=True) == (
        "run test-7 does not go on, its state is failed (waited 0.2 s for it). To go on with the run: "
        "streamrl run f.yaml --resume test-7"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_ends_at_once_when_it_is_told_to(number: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "flows.cli", "join", "test-1", "--wait", "600", "--ranks", "1"]
    environment = {**os.environ, "STREAMRL_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        wait_until(lambda: "waiting up to 600 s for run test-1" in log.read_text(), what="the wait")
        process.send_signal(number)
        wait_until(lambda: process.poll() is not None, what="its end", deadline_s=5)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert log.read_text().count("\n") == 2 and log.read_text().endswith("\ninterrupted\n")
