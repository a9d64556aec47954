"""Starts the processes of a run, and starts those that die again.

starting ──► running ──► ended with 0: done
               │  ▲
               ▼  │ after a moment that doubles with each death; it is short again after a healthy time
             died ──► replaced by a start elsewhere: the run fails here, and goes on there
               ├────► of an error that lasts: as after too many deaths, at once
               └────► more than `placement.restarts` times within an hour, or the same error twice in a row:
                        trainer, feeder: the run fails
                        generator, relay, rank: left out for a while; the run goes on while anyone makes
                        samples, and a join without generators while one of its processes is not left out

A generator may be added at any time, or retired: then it ends in an orderly way, and is not started again.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flows.run.commands import ENGINE_RANKS, FEEDER, GENERATOR, RANK, TRAINER, Worker
from flows.run.request import LastingFailure, RunFailed
from infra.roles.entry import LASTING, REPLACED
from infra.supervise.team import Ended, GuardDied, Team

_TIME = re.compile(r"\d\d:\d\d:\d\d ")
PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0  # before the second restart (the first is at once); maximum
HEALTHY_S = 600.0  # a process that lived so long starts anew: its earlier deaths in a row are forgotten
HOUR_S = 3600.0
LEFT_OUT_S = 600.0  # a process that is left out is tried again after this time: machines come back


@dataclass
class _Member:
    worker: Worker
    done: bool = False
    retires: bool = False  # it was told to end, since it is not needed any more
    deaths: deque[float] = field(default_factory=deque)  # within the last hour
    in_a_row: int = 0
    last_words: str = ""
    started_at: float = 0.0
    start_at: float | None = None  # when it is to be started again; None: it is not
    left_out: str = ""  # why it is left out; empty: it is not
    log: Path | None = None
    lasting: str = ""  # the error by which it is left out, if another start would meet it again

    @property
    def needed(self) -> bool:
        """Whether the run can't go on without this process."""
        return self.worker.role in (TRAINER, FEEDER)


class RunProcesses:
    """Starts the workers of a run and starts again those that die."""

    def __init__(
        self, team: Team, workers: Sequence[Worker], *, restarts: int, say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._team, self._restarts, self._say, self._clock = team, restarts, say, clock
        self._members = {worker.name: _Member(worker) for worker in workers}
        self._unsaid: list[str] = []  # news of members that are left out
        self._guards: deque[float] = deque()  # when guards died, within the last hour

    def start(self) -> None:
        """Start all workers."""
        for member in self._members.values():
            member.start_at = self._clock()
        self.start_again()

    @property
    def generators(self) -> list[str]:
        """The names of this machine's generators, without those that were retired."""
        return [one.worker.name for one in self._own_generators]

    @property
    def names(self) -> list[str]:
        """The names of all workers, also of those that are leaving."""
        return list(self._members)

    def command(self, name: str) -> list[str]:
        """Return the command by which a worker is started."""
        return self._members[name].worker.argv

    def add(self, worker: Worker) -> None:
        """Start one more worker, with the next call of `start_again`."""
        if worker.name in self._members:
            raise ValueError(f"{worker.name} is there already")
        self._members[worker.name] = _Member(worker, start_at=self._clock())

    def retire(self, name: str, grace_s: float) -> None:
        """Tell a generator to end: others go on with its samples. It has `grace_s` seconds for that."""
        member = self._members[name]
        if name not in self._team.running:  # it waits for a restart
            del self._members[name]
            return
        member.retires, member.start_at, member.left_out = True, None, ""
        self._team.stop(name, grace_s)

    @property
    def done(self) -> bool:
        """Whether trainer and feeder have done all their work. Generators only serve them."""
        return all(member.done for member in self._members.values() if member.needed)

    @property
    def all_done(self) -> bool:
        """Whether all processes have done their work, so that none runs or is started again."""
        return all(member.done for member in self._members.values())

    @property
    def left_out(self) -> dict[str, str]:
        """Processes that are left out since they can't be kept alive, each with the reason."""
        return {name: member.left_out for name, member in self._members.items() if member.left_out}

    def poll(self, wait_s: float, excused: Callable[[], bool] = lambda: False) -> None:
        """Wait up to `wait_s` seconds for workers that end, and handle it. Replaces a guard that died."""
        try:
            for ended in self._team.poll(wait_s):
                self.heard(ended, excused=excused())
        except GuardDied as died:
            self._renew(died)

    def heard(self, ended: Ended, *, excused: bool = False) -> None:
        """Handle a process's end. `excused`: not the process's fault, so that it costs no restart."""
        member, now = self._members[ended.name], self._clock()
        if member.retires:
            del self._members[ended.name]
            self._say(f"{ended.name} has left the run")
            return
        if ended.code == 0 and not ended.signal:
            member.done, member.left_out = True, ""
            self._say(f"{ended.name} is done")
            return
        if ended.code == REPLACED:
            self._give_up(member, ended, "it was started elsewhere, and the run goes on there")
            return
        if ended.code == LASTING:
            self._give_up(member, ended, "another start would fail likewise")
            return
        if now - member.started_at >= HEALTHY_S:
            member.in_a_row, member.last_words = 0, ""
        if excused:
            self._again(member, ended, 0.0, "")
            return
        member.deaths.append(now)
        member.in_a_row += 1
        within = _within_an_hour(member.deaths, now)
        again = self._same_again(member, ended)
        if within > self._restarts or again:
            self._give_up(
                member, ended, "it ended twice with the same last line" if again else _often(within)
            )
            return
        count = f" (restart {within} of {self._restarts} within an hour)"
        self._again(member, ended, _pause_s(member.in_a_row), count)

    def _again(self, member: _Member, ended: Ended, pause_s: float, count: str) -> None:
        member.start_at = self._clock() + pause_s
        after = f" after {pause_s:.0f} s" if pause_s else ""
        self._say(f"{ended.name} {ended.how}; it is started again{after}{count}; log: {ended.log}")

    def _give_up(self, member: _Member, ended: Ended, why: str) -> None:
        lasting = ended.code == LASTING
        if member.needed and lasting:
            raise LastingFailure(_paragraph(ended.name, ended.words, ended.log))
        if member.needed:
            kind = LastingFailure if ended.code == REPLACED else RunFailed  # there is nothing to resume
            raise kind(f"{ended.name} is not started again, since {why}: {ended.story}")
        first = not member.left_out
        member.left_out, member.lasting = f"{why}: {ended.story}", ended.words if lasting else ""
        member.log, member.start_at = ended.log, self._clock() + LEFT_OUT_S
        if first:
            words = f": {ended.words}" if ended.words else ""
            self._unsaid.append(
                f"{ended.name} is left out, and tried again every {LEFT_OUT_S / 60:.0f} minutes: {why}; "
                f"the last time it {ended.how}{words}; log: {ended.log}"
            )

    def check(self, others: Callable[[], bool] = lambda: False) -> None:
        """Raise RunFailed if nobody can make samples, or if all that was started here is left out.

        `others`: whether generators elsewhere are heard.
        """
        some, who, lost = self._own_generators, "generators", "no samples can be made"
        everybody = list(self._members.values())
        roles = {member.worker.role for member in everybody}
        joined = not any(member.needed for member in everybody)
        if joined and (GENERATOR not in roles or roles & {RANK, ENGINE_RANKS}):
            some, who, lost = everybody, "processes", "nothing goes on here"
        if some and all(member.left_out for member in some) and not self._alive(some) and not others():
            first = some[0]
            if first.lasting and len({member.lasting for member in some}) == 1:
                assert first.log is not None
                named = first.worker.name if len(some) == 1 else f"all {len(some)} {who}"
                raise LastingFailure(_paragraph(named, first.lasting, first.log))
            stories = "\n".join(dict.fromkeys(member.left_out for member in some[:3]))
            raise RunFailed(f"{lost}: all {len(some)} {who} are left out: {stories}")
        for text in self._unsaid:  # not if the run ends: then the error says it
            self._say(text)
        self._unsaid.clear()

    @property
    def _own_generators(self) -> list[_Member]:
        return [one for one in self._members.values() if one.worker.role == GENERATOR and not one.retires]

    def _alive(self, members: Sequence[_Member]) -> bool:
        return any(member.worker.name in self._team.running for member in members)

    def _same_again(self, member: _Member, ended: Ended) -> bool:
        """Whether it ended by itself with the same last line as before: another start would end so, too."""
        last = ended.words
        last = last.partition(" ")[2] if _TIME.match(last) else last
        before, member.last_words = member.last_words, last
        return bool(ended.code and last and last == before)

    def start_again(self) -> None:
        """Start the processes whose pause is over."""
        now = self._clock()
        for member in list(self._members.values()):
            if member.start_at is not None and member.start_at <= now:
                try:
                    self._team.start(member.worker.name, member.worker.argv, member.worker.env)
                except GuardDied as died:
                    self._renew(died)
                    return  # the others, and this one, are due the next time
                again, member.start_at, member.started_at = member.started_at > 0, None, now
                if again and member.worker.role != GENERATOR:
                    self._wake_generators()
            elif member.left_out and member.start_at is None and now - member.started_at >= HEALTHY_S:
                member.left_out = ""
                self._say(f"{member.worker.name} runs again, and is not left out any more")

    def _renew(self, died: GuardDied) -> None:
        """Replace a guard that died. That costs no worker a restart; but guards may not go on dying."""
        self._guards.append(self._clock())
        if _within_an_hour(self._guards, self._clock()) > max(1, self._restarts):
            raise died
        self._say(f"{died}; guard and workers are started again")
        self._team.renew()
        for ended in died.lost:
            self.heard(ended, excused=True)

    def _wake_generators(self) -> None:
        """Start generators that are done: a trainer that went back may need them. If not, they end again."""
        for member in self._members.values():
            if member.worker.role == GENERATOR and member.done and not member.retires:
                member.done, member.start_at = False, self._clock()

    def dismiss(self, grace_s: float) -> None:
        """Stop all workers that still run, at once, and wait for them. `start` starts them anew."""
        try:
            for name in self._team.running:
                self._team.stop(name, grace_s)
            until = time.monotonic() + grace_s + 5.0
            while self._team.running and time.monotonic() < until:
                for ended in self._team.poll(0.2):
                    if self._members[ended.name].retires:
                        del self._members[ended.name]
        except GuardDied:
            return  # all workers died with the guard


def _paragraph(who: str, words: str, log: Path) -> str:
    """Say why a run ended that no other start can help."""
    return f"{words}\n({who} ended by this error, and another start would, too; the log is {log})"


def _within_an_hour(times: deque[float], now: float) -> int:
    while times and times[0] < now - HOUR_S:
        times.popleft()
    return len(times)


def _pause_s(deaths: int) -> float:
    """Return the seconds before a restart: 0 after the first death in a row, then twice as many each time."""
    return 0.0 if deaths < 2 else min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(deaths - 2, 32))


def _often(deaths: int) -> str:
    return f"it died {deaths} times within an hour" if deaths > 1 else "it died"
