"""The phase in which a run is trained: start the processes, watch them, end when all is done.

crew ◄── who died ── team ◄── guard ◄── feeder, trainer, generators
follower ◄── topics           three times a second: show, note, and check that something gets on
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from flows.crew import Crew
from flows.follow import Follower
from flows.places import LOCAL, Places, logs_folder, report_folder
from flows.request import RunCancelled, RunFailed
from flows.screen import Screen
from flows.view import RunView
from flows.workers import workers
from infra.runs import RunRecord
from infra.stack import local as stack
from infra.stack.files import locked
from infra.supervise.team import Team
from infra.waiting import WaitedTooLong

GRACE_S = 10.0
TICK_S = 0.3
NOTE_EVERY_S = 2.0
PROCESSES_FILE = "processes.jsonl"


def train(record: RunRecord, places: Places, screen: Screen, *, told_to_stop: Callable[[], bool]) -> None:
    """Until the last iteration is trained and the last evaluation is in. Raises RunFailed."""
    folder = report_folder(record)
    with ExitStack() as stack_:
        # a flow that was killed lets go only when its guard has ended the workers
        lock = stack_.enter_context(
            locked(folder / ".lock", what=f"run {record.id}", deadline_s=GRACE_S + 15.0)
        )
        team = stack_.enter_context(Team(logs_folder(record), grace_s=GRACE_S, holds=(lock,)))
        follower = stack_.enter_context(Follower(record))
        crew = Crew(
            team, workers(record, places), restarts=record.spec.placement.restarts, say=screen.say
        )  # fmt: skip
        broker = _Broker(record, screen.say)
        pulse, notes = _Pulse(record), _Notes(folder / PROCESSES_FILE)
        crew.start()
        while not crew.done:
            for ended in team.poll(TICK_S):
                crew.heard(ended, excused=broker.was_away(check_now=True))
            broker.check()
            crew.start_again()
            follower.see(screen.show)
            follower.see(notes.note)
            follower.see(pulse.check)
            if told_to_stop():
                raise RunCancelled(f"run {record.id} was cancelled")
        crew.dismiss(GRACE_S)
        follower.see(screen.show)
        follower.see(notes.note_all)


class _Broker:
    """The local broker is ours to start again; a cluster of the user's is not."""

    CHECK_EVERY_S = 2.0
    EXCUSE_S = 60.0  # how long a process may still die of a broker that was away

    def __init__(self, record: RunRecord, say: Callable[[str], None]) -> None:
        self._servers, self._say = record.bootstrap_servers, say
        self._local = record.spec.placement.kafka.bootstrap_servers == LOCAL
        self._checked_at = time.monotonic()
        self._back_at: float | None = None

    def was_away(self, *, check_now: bool = False) -> bool:
        """Whether a process that dies now may have died of it."""
        if check_now:
            self.check(now=True)
        return self._back_at is not None and time.monotonic() - self._back_at < self.EXCUSE_S

    def check(self, *, now: bool = False) -> None:
        """Start it again if it died; not if somebody stopped it."""
        if not self._local or (not now and time.monotonic() - self._checked_at < self.CHECK_EVERY_S):
            return
        self._checked_at = time.monotonic()
        status = next(service.status for service in stack.state() if service.name == "kafka")
        if status in ("running", "starting"):
            return
        if status == "stopped":
            raise RunFailed("the local Kafka was stopped while the run went on, by `streamrl down`")
        self._say("the local Kafka is gone; starting it again")
        running = stack.up(
            kafka=True, prefect=False, progress=lambda name, text: self._say(f"{name}: {text}")
        )
        self._back_at = self._checked_at = time.monotonic()
        if running.bootstrap_servers != self._servers:
            raise RunFailed(
                f"Kafka came back at {running.bootstrap_servers}: the port of {self._servers} is taken. "
                "Resume the run"
            )


class _Pulse:
    """A run in which nothing happens is ended, with what everyone waits for."""

    def __init__(self, record: RunRecord) -> None:
        deadlines = record.spec.deadlines
        # The processes have deadlines of their own and say more: this is for when they themselves hang.
        self._patience_s = deadlines.start_s + deadlines.progress_s + 30.0
        self._last: tuple[object, ...] = ()
        self._since = time.monotonic()

    def check(self, view: RunView) -> None:
        """Raise WaitedTooLong when nothing has changed for too long."""
        if view.pulse != self._last:
            self._last, self._since = view.pulse, time.monotonic()
        elif time.monotonic() - self._since > self._patience_s:
            trouble = f"\n  {view.trouble}" if view.trouble else ""
            raise WaitedTooLong(
                f"run {view.run}: nothing got on for {self._patience_s:.0f} s. Its processes:\n"
                f"{view.waits()}{trouble}"
            )


class _Notes:
    """What the processes did over time: heartbeats are compacted away, the report needs them."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0.0

    def note(self, view: RunView) -> None:
        """One line for each process, every few seconds."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + NOTE_EVERY_S
            self._write(view, [name for name, process in view.processes.items() if process.alive])

    def note_all(self, view: RunView) -> None:
        """What all of them said last."""
        self._write(view, list(view.processes))

    def _write(self, view: RunView, names: list[str]) -> None:
        step = view.last["step"] if view.last else None
        notes = []
        for name in sorted(names):
            process = view.processes[name]
            note = {"at": process.beat.sent_at, "process": name, "step": step, "idle": process.idle_share}
            notes.append(note | {"cpu": process.cpu.per_s, "counters": process.beat.counters})
        if notes:
            with self._path.open("a") as file:
                file.writelines(json.dumps(note) + "\n" for note in notes)
