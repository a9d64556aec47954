"""Deployments that hold a run's ranks on other machines: each is called, and called again once it has ended.

A job that goes on holds its ranks through every start of the trainer. One that has ended holds none: its
machine died or was taken away, and another one of its pool may bring ranks. Jobs that end soon are called
less and less often.
"""

from __future__ import annotations

import contextvars
import threading
import time
from dataclasses import dataclass
from types import TracebackType

from flows.run.host import CannotCall, Host
from flows.run.suggested_commands import SuggestedCommands
from flows.view.screen import Screen
from infra.runs import RunRecord

LOOK_AGAIN_S = 30.0
LONGEST_PAUSE_S = 900.0
LONG_LIFE_S = 600.0  # after a job that lived so long, pauses are short again


@dataclass
class _Called:
    deployment: str
    ranks: int
    called_at: float
    pause_s: float
    failed: bool = False  # it could not be called again, and that was said


class RankCalls:
    """Calls `placement.ranks.deployments` while a run trains."""

    def __init__(self, host: Host, record: RunRecord, screen: Screen) -> None:
        self._host, self._record, self._screen = host, record, screen
        self._called: list[_Called] = []
        self._ended = threading.Event()

    def __enter__(self) -> RankCalls:
        self._called = self.call()
        if self._called:  # a host may know by the context which job it runs
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(self._keep,), name="rank calls", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def call(self) -> list[_Called]:
        """Call each deployment, and say what to type in place of those that can't be called."""
        commands, none_can = SuggestedCommands(self._record.id, self._record.store), ""
        called = []
        for deployment, ranks in self._record.spec.placement.ranks.deployments.items():
            try:
                if not (why := none_can):
                    self._host.call_ranks(self._record, deployment, ranks)
                    called.append(_Called(deployment, ranks, time.monotonic(), LOOK_AGAIN_S))
                    continue
            except CannotCall as error:
                why = str(error)
            except Exception as error:  # such as one of a server that is away: all calls would wait for it
                why = none_can = (
                    f"placement.ranks.deployments can't be called: {type(error).__name__}: {error}"
                )
            join = commands.command("join", "--ranks", str(ranks))
            self._screen.say(f"{why}. On the machine of {deployment} say: {join}")
        return called

    def look(self, one: _Called) -> None:
        """Call a deployment again if its job has ended, and not too soon after the last call."""
        lived_s = time.monotonic() - one.called_at
        if lived_s < one.pause_s:
            return
        try:
            again = self._host.call_ranks(self._record, one.deployment, one.ranks)
        except Exception as error:  # such as one of a server that is away: it is asked again
            if not one.failed:
                self._screen.say(f"{one.deployment} can't be called: {type(error).__name__}: {error}")
            one.failed = True
            return
        one.failed = False
        if again:
            one.called_at, one.pause_s = time.monotonic(), min(2 * one.pause_s, LONGEST_PAUSE_S)
            self._screen.say(f"{one.deployment} had ended, and was called again for {one.ranks} ranks")
        elif lived_s >= LONG_LIFE_S:
            one.pause_s = LOOK_AGAIN_S

    def _keep(self) -> None:
        while not self._ended.wait(LOOK_AGAIN_S):
            for one in self._called:
                self.look(one)
