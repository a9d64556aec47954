"""The state of a run, as its flow keeps it in the store, and the request to stop it.

runs/<run>/state.json   replaced every few seconds while the flow lives, and once when it ends
runs/<run>/stop.json    put by `streamrl stop`; the flow sees it within seconds and ends in order
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.run.locations import report_folder
from flows.run.request import RunCancelled, RunSuspended
from flows.view.run_view import RunView
from infra.background import Background
from infra.runs import RunRecord, host_name, runs_of
from infra.sites.timed_reports import TimedReports
from infra.stores.store import Missing, Store, StoreError
from schemas.shortening import bounded

LOOK_EVERY_S = 3.0  # between looks for a request to stop
WRITE_EVERY_S = 12.0
SILENT_S = 90.0  # a flow that wrote nothing for so long is gone, or the clock of its machine is another
SILENT_NOTE = (
    "silent is by this machine's clock: if `last heard` does not grow, the run lives, and two clocks differ"
)
HEARD_WITHIN_S = 20.0  # a flow that lives writes within this: WRITE_EVERY_S, a look, and a slow store
_END_S = 5.0  # for the last write: a store that is away must not hold up the end
_MOST_BYTES = 1 << 16

_log = logging.getLogger(__name__)
ShortText = Annotated[str, Field(max_length=4096)]
Phase = Literal["starting", "training", "paused", "reporting", "ended", "failed", "interrupted", "suspended"]
ACTIVE = ("starting", "training", "paused", "reporting")


class RunState(BaseModel):
    """A run's state when its flow last wrote it down."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    run: ShortText
    state: Phase
    at: float  # when this was written
    started_at: float  # of the flow
    host: ShortText
    pid: int
    iterations: int  # that the run shall have
    iteration: int | None = None  # the newest that has a step
    step: int | None = None
    reward: float | None = None
    why: ShortText = ""  # the error of a run that failed
    trained: bool = False  # whether the last iteration is trained and evaluated; the report may be missing
    report: ShortText = ""  # the report folder, on `host`
    fork: ShortText = ""  # the run that it is a fork of, and the step; empty: it is none
    go_on: ShortText = ""  # the command that goes on with the run

    @property
    def is_active(self) -> bool:
        """Whether the flow had not ended when it wrote this."""
        return self.state in ACTIVE

    @property
    def now(self) -> str:
        """The state in one word: `silent` if the flow should have written more by now."""
        return "silent" if self.is_active and time.time() - self.at > SILENT_S else self.state


def read_state(store: Store, run: str) -> RunState | None:
    """Return the state of a run; None if it has none that can be read, as runs of older releases."""
    try:
        raw = store.get(_state_key(run), _MOST_BYTES)
        return RunState.model_validate_json(raw[:_MOST_BYTES])
    except (Missing, ValidationError):
        return None


def read_states(store: Store) -> dict[str, RunState | None]:
    """Return the states of all runs of a store, the newest run first."""
    found = {run: read_state(store, run) for run in runs_of(store)}
    return dict(sorted(found.items(), key=lambda item: -(item[1].started_at if item[1] else 0.0)))


def ask_to_stop(store: Store, run: str) -> None:
    """Ask the flow of a run to end it in order."""
    store.put(_stop_key(run), json.dumps({"asked_at": time.time(), "by": host_name()}).encode())


class StateKeeper:
    """Keeps a run's state in the store while the block lasts. A screen: `show` takes the run's figures."""

    def __init__(self, record: RunRecord, store: Store, go_on: str) -> None:
        self._store, self._run = store, record.id
        self._state = RunState(
            run=record.id, state="starting", at=0.0, started_at=time.time(), host=host_name()[:200],
            pid=os.getpid(), iterations=record.spec.algorithm.iterations, go_on=go_on[:4000],
            fork=record.fork.words[:400] if record.fork else "",
            report=str(report_folder(record))[:4000],
        )  # fmt: skip
        self._written_at = 0.0
        self._changing = threading.Lock()  # the run's thread and the one that writes both change the state
        self._reports = TimedReports(self._look, lambda: LOOK_EVERY_S, _log)
        self.stop_asked = False

    def __enter__(self) -> StateKeeper:
        try:
            self._store.delete(_stop_key(self._run))  # a request to an earlier start
        except StoreError as error:
            _log.warning("an old request to stop could not be removed: %s", error)
        self._reports.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._change(state="ended")
        elif isinstance(error, RunSuspended):
            self._change(state="suspended", why="paused; its flow run is resumed at Prefect")
        else:
            # Prefect raises one that is no Exception where a worker's flow run is cancelled or gets SIGTERM
            stopped = isinstance(error, RunCancelled) or not isinstance(error, Exception)
            why = bounded(str(error)) or ("Ctrl-C or a signal" if stopped else type(error).__name__)
            self._change(state="interrupted" if stopped else "failed", why=why)
            if getattr(error, "lasting", False):
                self._change(go_on="")  # it would end by the same error
        last = Background(self._end, "state")
        last.start()
        last.join(_END_S)

    def phase(self, state: Phase) -> None:
        """Note the phase that begins now."""
        self._change(state=state)
        self._written_at = 0.0
        self._reports.soon()

    def trained(self) -> None:
        """Note that training has ended, and that the report is written now."""
        self._change(trained=True)
        self.phase("reporting")

    def say(self, text: str) -> None: ...

    def progress(self, fraction: float, text: str) -> None: ...

    def show(self, view: RunView) -> None:
        if (row := view.last) is not None:
            self._change(iteration=row["iteration"], step=row["step"], reward=row["reward"])

    def _change(self, **fields: object) -> None:
        with self._changing:
            self._state = self._state.model_copy(update=fields)

    def _end(self) -> None:
        self._reports.close()
        self._write()
        self._store.delete(_stop_key(self._run))

    def _look(self) -> None:
        self.stop_asked = self.stop_asked or self._store.exists(_stop_key(self._run))
        if time.monotonic() - self._written_at > WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        self._change(at=time.time())
        self._store.put(_state_key(self._run), self._state.model_dump_json(indent=1).encode())
        self._written_at = time.monotonic()


def is_heard_again(
    store: Store, run: str, before: RunState, deadline_s: float, tell: Callable[[str], None]
) -> bool:
    """Watch whether a run's flow writes its state anew, whatever the clock of its machine says."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if read_state(store, run) != before:
            return True
        tell(f"run {run} looks silent: {until - time.monotonic():.0f} s are left to hear from its flow")
        time.sleep(0.5)
    return False


def wait_until_stopped(
    store: Store, run: str, deadline_s: float, tell: Callable[[str], None]
) -> RunState | None:
    """Wait until the flow of a run has ended, and return its last state; None if it goes on."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        found = read_state(store, run)
        if found is None or not found.is_active:
            return found
        tell(f"run {run} is asked to stop; {until - time.monotonic():.0f} s are left to wait")
        time.sleep(0.5)
    return None


def _state_key(run: str) -> str:
    return f"runs/{run}/state.json"


def _stop_key(run: str) -> str:
    return f"runs/{run}/stop.json"
