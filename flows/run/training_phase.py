"""The phase that trains a run: it starts the processes, watches them, and ends when all is done.

crew ◄── who died ── team ◄── guard ◄── feeder, trainer, generators
follower ◄── topics           three times a second: show, note, and check that something moves
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from flows.balancing.staff import Staff
from flows.monitoring.exporter import exporting
from flows.run.archiving import archiving
from flows.run.commands import workers
from flows.run.dealt_gpus import DealtGpus
from flows.run.failure_page import page_on_failure
from flows.run.gpu_claims import GpuClaims
from flows.run.host import HostOrder
from flows.run.locations import Places, logs_folder, report_folder
from flows.run.request import RunCancelled, RunFailed
from flows.run.run_balance import RunBalance
from flows.run.supervision import RunProcesses
from flows.view.follow import Follower
from flows.view.line_files import METRICS_FILE, MetricsFile
from flows.view.process_notes import ProcessNotes
from flows.view.reward_trouble import RewardSayings
from flows.view.run_view import RunView
from flows.view.screen import Screen
from infra.runs import RunRecord
from infra.stack import local as stack
from infra.supervise.team import Team
from infra.waiting import WaitedTooLong
from schemas.addresses import LOCAL

END_GRACE_S = 10.0
LOCK_S = END_GRACE_S + 15.0  # a start that was killed lets go when its guard has ended its processes
TICK_S = 0.3


def run_training(
    record: RunRecord, places: Places, screen: Screen, *, order: Callable[[], HostOrder],
    called: Staff | None = None, locks: Sequence[int] = (),
) -> bool:  # fmt: skip
    """Train until the last iteration is trained and the last evaluation is in. Raises RunFailed.

    `called`: generators that the host calls, if the run is balanced so. `locks`: of the run, which its
    processes hold too, until the last of them has ended.
    Returns False if the run was told to pause before that; its processes have ended then.
    """
    folder = report_folder(record)
    with ExitStack() as stack_:
        claims = stack_.enter_context(GpuClaims())
        balance = RunBalance(record)
        gpus = claims.deal(DealtGpus.of_run(record.spec), balance.generators)
        team = Team(logs_folder(record), grace_s=END_GRACE_S, holds=(*locks, *claims.descriptors))
        crew = RunProcesses(
            team, workers(record, places, gpus, balance.generators),
            restarts=record.spec.placement.restarts, say=screen.say,
        )  # fmt: skip
        keeper = balance.keeper(crew, places, claims, screen.say, called)
        follower = Follower(record, metrics=MetricsFile(folder / METRICS_FILE), also=keeper.take)
        stack_.enter_context(page_on_failure(record, places, screen.say, follower))
        stack_.enter_context(team)
        stack_.enter_context(follower)
        stack_.enter_context(exporting(record, follower, screen.say))
        stack_.enter_context(archiving(record, places.open_store(), screen.say))
        broker = _Broker(record, screen.say)
        stillness, notes = Stillness(record), ProcessNotes(folder, record.created_at, screen.say)
        sayings = RewardSayings(folder, screen.say)
        crew.start()
        while not crew.done:
            crew.poll(TICK_S, excused=lambda: broker.was_away(check_now=True))
            broker.check()
            crew.start_again()
            crew.check(others=lambda: follower.see(RunView.makes_samples))
            keeper.tick()
            notes.left_out(crew.left_out)
            follower.see(lambda view: view.leave_out(crew.left_out))
            follower.see(screen.show)
            follower.see(notes.note)
            follower.see(lambda view: sayings.see(view.rewards))
            follower.see(stillness.check)
            match order():
                case HostOrder.CANCEL:
                    raise RunCancelled(f"run {record.id} was cancelled")
                case HostOrder.PAUSE:
                    return False
        crew.dismiss(END_GRACE_S)
        # The last steps are shown, too: the view is a second behind.
        last = record.spec.algorithm.iterations
        follower.wait_for(lambda view: view.iterations_begun() >= last, END_GRACE_S)
        follower.see(screen.show)
        follower.see(lambda view: sayings.see(view.rewards))
        follower.see(notes.note_all)
    return True


class _Broker:
    """Starts the local broker again if it dies. A cluster of the user's is left alone."""

    CHECK_EVERY_S = 2.0
    EXCUSE_S = 60.0  # after the broker is back: a process may still die of its absence

    def __init__(self, record: RunRecord, say: Callable[[str], None]) -> None:
        self._servers, self._say = record.bootstrap_servers, say
        self._local = record.spec.placement.kafka.bootstrap_servers == LOCAL
        self._checked_at = time.monotonic()
        self._back_at: float | None = None

    def was_away(self, *, check_now: bool = False) -> bool:
        """Whether a process that dies now may have died because the broker was away."""
        if check_now:
            self.check(now=True)
        return self._back_at is not None and time.monotonic() - self._back_at < self.EXCUSE_S

    def check(self, *, now: bool = False) -> None:
        """Start the local broker again if it died. Raises RunFailed if somebody stopped it."""
        if not self._local or (not now and time.monotonic() - self._checked_at < self.CHECK_EVERY_S):
            return
        self._checked_at = time.monotonic()
        status = next(service.status for service in stack.stack_state() if service.name == "kafka")
        if status in ("running", "starting"):
            return
        if status == "stopped":
            raise RunFailed("the local Kafka was stopped while the run went on, by `streamrl down`")
        self._say("the local Kafka is gone; starting it again")
        running = stack.start_stack(
            kafka=True, prefect=False, progress=lambda name, text: self._say(f"{name}: {text}")
        )
        self._back_at = self._checked_at = time.monotonic()
        if running.bootstrap_servers != self._servers:
            raise RunFailed(
                f"Kafka came back at {running.bootstrap_servers}: the port of {self._servers} is taken. "
                "Resume the run"
            )


class Stillness:
    """Ends a run in which nothing moves. The message says what each process waits for."""

    def __init__(self, record: RunRecord) -> None:
        deadlines = record.spec.deadlines
        # The processes have deadlines of their own and say more: this one is for processes that hang.
        self._patience_s = deadlines.start_s + deadlines.progress_s + 30.0

    def check(self, view: RunView) -> None:
        """Raise WaitedTooLong if nothing moved for too long. Time without a working view is left out."""
        if view.evidence.still_s > self._patience_s:
            raise WaitedTooLong(
                f"run {view.run}: nothing moved for {self._patience_s:.0f} s. Its processes:\n{view.waits()}"
            )
