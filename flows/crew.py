"""The processes of a run: which are there, which are done, which are started again.

starting ──► running ──► ended with 0: done
               │  ▲
               ▼  │ after a moment, at most `placement.restarts` times
             died ──► no restarts left, or the same error twice: the run fails
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.request import RunFailed
from flows.workers import FEEDER, GENERATOR, TRAINER, Worker
from infra.supervise.team import Ended, Team

_TIME = re.compile(r"\d\d:\d\d:\d\d ")
PAUSES_S = (0.0, 2.0, 5.0, 15.0)  # before the first restart, the second, ...


@dataclass
class _Member:
    worker: Worker
    restarts: int = 0
    done: bool = False
    last_words: str = ""
    start_at: float | None = None  # monotonic; set while it waits to be started again


class Crew:
    """Starts the workers of a run and starts again those that die."""

    def __init__(
        self, team: Team, workers: Sequence[Worker], *, restarts: int, say: Callable[[str], None]
    ) -> None:
        self._team, self._restarts, self._say = team, restarts, say
        self._members = {worker.name: _Member(worker) for worker in workers}

    def start(self) -> None:
        """All of them."""
        for member in self._members.values():
            self._team.start(member.worker.name, member.worker.argv, member.worker.env)

    @property
    def done(self) -> bool:
        """Whether trainer and feeder have done all their work: generators only serve them."""
        ends = [member.done for member in self._members.values() if member.worker.role in (TRAINER, FEEDER)]
        return all(ends)

    @property
    def all_done(self) -> bool:
        """Whether nobody is left, and nobody comes again."""
        return all(member.done for member in self._members.values())

    def heard(self, ended: Ended, *, excused: bool = False) -> None:
        """A process ended. `excused`: not its fault, so it costs none of its restarts."""
        member = self._members[ended.name]
        if ended.code == 0 and not ended.signal:
            member.done = True
            self._say(f"{ended.name} is done")
            return
        if not excused:
            member.restarts += 1
        if member.restarts > self._restarts:
            raise RunFailed(f"{self._often(member)}{ended.story}")
        if self._same_again(member, ended) and not excused:
            raise RunFailed(f"twice of the same: {ended.story}")
        pause = PAUSES_S[min(max(member.restarts - 1, 0), len(PAUSES_S) - 1)]
        member.start_at = time.monotonic() + pause
        count = "" if excused else f" (restart {member.restarts} of {self._restarts})"
        self._say(f"{ended.name} {ended.how}; it is started again{count}; log: {ended.log}")

    def _same_again(self, member: _Member, ended: Ended) -> bool:
        """Whether it ended by itself, saying the same as before: it would say so a third time."""
        last = ended.last_lines.rpartition("\n")[2]
        last = last.partition(" ")[2] if _TIME.match(last) else last
        before, member.last_words = member.last_words, last
        return bool(ended.code and last and last == before)

    def _often(self, member: _Member) -> str:
        return f"died {member.restarts} times, the last time: " if member.restarts > 1 else ""

    def start_again(self) -> None:
        """Those whose pause is over."""
        due = [m for m in self._members.values() if m.start_at is not None and m.start_at <= time.monotonic()]
        for member in due:
            member.start_at = None
            self._team.start(member.worker.name, member.worker.argv, member.worker.env)
            if member.worker.role != GENERATOR:
                self._wake_generators()

    def _wake_generators(self) -> None:
        """One that is done may be needed by a trainer that went back; if not, it ends again."""
        for member in self._members.values():
            if member.worker.role == GENERATOR and member.done:
                member.done, member.start_at = False, time.monotonic()

    def dismiss(self, grace_s: float) -> None:
        """Stop those that still run, all at once, and wait for them."""
        for name in self._team.running:
            self._team.stop(name, grace_s)
        until = time.monotonic() + grace_s + 5.0
        while self._team.running and time.monotonic() < until:
            self._team.poll(0.2)
