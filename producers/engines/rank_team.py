"""Rank 0's end of the other ranks of its engine: starts them, tells them what to do, and watches them.

rank 0 ── acts, as it does them itself ──► rank n     between steps
       ── prepare, hash ──────────────────► rank n     beside steps
       ── a patch, once ──────────────────► machine    for all ranks there

A rank that dies, refuses or stands still ends the engine: the others would wait for it for ever, in a sum.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

import msgspec

from infra.ranks.rank_addresses import meeting_place
from producers.engines import engine_end
from producers.engines.engine import EngineError
from producers.engines.engine_door import EngineDoor
from producers.engines.engine_messages import EngineOptions, Paced, Prepare, Ready, Refused
from producers.engines.far_machine import FarMachine
from producers.engines.far_messages import StartRanks
from producers.engines.other_engine_ranks import FarEngineRank, LocalEngineRank, OtherEngineRank
from producers.engines.rank_marks import RankMarks
from producers.engines.rank_meeting import EngineMeeting, FarMeeting, LocalMeeting
from producers.engines.rank_messages import Act, BesideAct, BesideReport, Decided, Did, RankReport
from producers.engines.same_work import DISAGREE

_LOOK_S = 0.5  # how often the watch looks at the time
_REPORT_BYTES, _HASHES_BYTES = 1 << 20, 256 << 20  # of the largest report, and of the largest of hashes
_GRACE_S = 5.0  # how long rank 0 has to end by itself once another rank has failed

_Report = TypeVar("_Report", Ready, Did)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RankReport]).decode
_decode_beside = msgspec.msgpack.Decoder(BesideReport).decode


class RankTeam:
    """The other ranks of an engine. All methods but `prepare` and `hashes` are for rank 0's own thread."""

    def __init__(
        self, options: EngineOptions, ranks: int, group: str, *, deadline_s: float,
        door: EngineDoor | None = None,
    ) -> None:  # fmt: skip
        """`door`: where machines come in that hold the last ranks; None: all are on this machine."""
        self._options, self._ranks, self.group, self._deadline = options, ranks, group, deadline_s
        self._memory = os.memfd_create("meeting")
        self.meeting: EngineMeeting = LocalMeeting(f"/proc/{os.getpid()}/fd/{self._memory}")
        self._door = door
        self._marks = RankMarks()
        self._others: list[OtherEngineRank] = []
        self._machines: list[FarMachine] = []
        self._error: EngineError | None = None
        self._noticed, self._closed = threading.Event(), threading.Event()
        self._busy_since: float | None = None
        self._doing = ""
        self._watch = threading.Thread(target=self._look, daemon=True, name="ranks")

    def open(self) -> RankTeam:
        """Start the processes, from rank 0's own thread, which lives as long as they shall. Return itself.

        With ranks on other machines it waits for these first.
        """
        self._owner = threading.get_ident()
        far: list[OtherEngineRank] = []
        here = self._ranks
        if self._door is not None:
            with contextlib.closing(self._door.open()) as door:
                here -= door.wanted
                far += self._begin(door, here)
        for number in range(1, here):
            self._others.append(
                LocalEngineRank(number).open(
                    self._options, meeting=self.meeting, group=self.group, marks=str(self._marks.path)
                )
            )
        self._others += far
        self._watch.start()
        return self

    def _begin(self, door: EngineDoor, first: int) -> list[FarEngineRank]:
        """Have the machines start the ranks from `first` on, in a row. Return those."""
        self._machines = door.machines(self._deadline)
        held = [
            (one, number)
            for number, one in enumerate(self._machines, 1)
            for _ in range(min(one.ranks, self._ranks))
        ]
        held = held[: self._ranks - first]
        self._place = meeting_place(self._ranks, door.host)
        numbers = [0] * first + [number for _, number in held]
        self.meeting = meeting = FarMeeting(door.host, self._place.port, door.host, numbers)
        door.expect(range(first, self._ranks))
        for number, machine in enumerate(self._machines, 1):
            ranks = [rank for rank, its in enumerate(numbers) if its == number]
            start = StartRanks(self._options, ranks, meeting, self.group, door.token)
            machine.start(start, self._marks, self._deadline)
        links = door.links(self._deadline, self._machines)
        return [
            FarEngineRank(rank, machine, links[rank, False], links[rank, True])
            for rank, (machine, _) in enumerate(held, first)
        ]

    @contextmanager
    def doing(self, what: str, *, marked: bool = True) -> Iterator[None]:
        """Do something that other ranks do, too. Raises EngineError if one of them fails meanwhile.

        `marked`: whether other ranks mark it, too.
        """
        self._check()
        self._doing, self._busy_since = what, time.monotonic()
        if marked:
            self._marks.begin(0)
        try:
            yield
        except EngineError:
            raise
        except Exception:
            self._await_cause()
            raise
        finally:
            self._marks.end(0)
            self._busy_since = None
        self._check()

    def send(self, acts: Sequence[Act]) -> None:
        """Tell all other ranks what to do. Acts that need an answer come last."""
        data = _encode(acts)
        for other in self._others:
            with contextlib.suppress(OSError):  # it has ended: the watch says how
                other.acts.send_bytes(data)

    def decide(self, own: Callable[[], Sequence[float]]) -> Sequence[float]:
        """Decide something in the middle of an act, and tell the other ranks, which wait for it there."""
        found = list(own())
        self.send([Decided(found)])
        return found

    def await_ready(self) -> None:
        """Wait until all other ranks can take acts."""
        for other in self._others:
            self._next(other, Ready)

    def agree(self, digest: bytes, what: str) -> None:
        """Wait until all other ranks did the last act. Raise EngineError if another thing came of it."""
        for other in self._others:
            if self._next(other, Did).digest != digest:
                raise EngineError(f"{other.name} and rank 0 have other {what}: {DISAGREE}")

    def prepare(self, act: Prepare, own: Callable[[], None]) -> None:
        """Have all ranks prepare weights at the same time; `own` does it for rank 0. Called beside steps.

        A patch goes to each other machine once, while the ranks of this one read it.
        """
        with ThreadPoolExecutor(max(1, len(self._machines)), "patch") as pool:
            there = {one: pool.submit(one.bring, Path(act.file)) for one in self._machines}
            self._ask(act, [one for one in self._others if not isinstance(one, FarEngineRank)])
            own()
            for one in self._others:
                if isinstance(one, FarEngineRank):
                    self._ask(Prepare(str(self._brought(there[one.machine]))), [one])
        for _ in self._held("prepare weights"):
            pass
        for machine in self._machines:
            machine.drop_patch()

    def _brought(self, patch: Future[Path]) -> Path:
        try:
            return patch.result()
        except EngineError:
            self._await_cause()
            raise

    def hashes(self, act: BesideAct, own: Callable[[], dict[str, str]]) -> list[dict[str, str]]:
        """Return the digests of all ranks, in their order. Called beside steps."""
        self._ask(act, self._others)
        return [own(), *self._held("hash weights")]

    def close(self) -> None:
        """End the other ranks."""
        self._closed.set()
        for machine in self._machines:
            machine.drop()
        for other in self._others:
            other.close()
        if self._watch.is_alive():
            self._watch.join()

    def _ask(self, act: BesideAct, others: Sequence[OtherEngineRank]) -> None:
        for other in others:
            with contextlib.suppress(OSError):
                other.beside.send_bytes(_encode(act))

    def _held(self, what: str) -> Iterator[dict[str, str]]:
        until = time.monotonic() + self._deadline
        for other in self._others:
            while not other.beside.poll(min(_LOOK_S, max(0.0, until - time.monotonic()))):
                self._check()
                if time.monotonic() > until:
                    raise self._late(other, f"to {what}")
            try:
                report = _decode_beside(other.beside.recv_bytes(_HASHES_BYTES))
            except (EOFError, OSError):
                self._await_cause()
                raise EngineError(f"{other.name} has ended") from None
            except msgspec.MsgspecError as error:
                raise _unreadable(other, error) from None
            if isinstance(report, Refused):
                raise _refusal(other, report)
            yield report.digests

    def _next(self, other: OtherEngineRank, kind: type[_Report]) -> _Report:
        try:
            report = other.reports.get(timeout=self._deadline)
        except queue.Empty:
            raise self._late(other, "to do what rank 0 has done") from None
        self._check()
        if not isinstance(report, kind):
            raise EngineError(f"{other.name} says {type(report).__name__} where {kind.__name__} is due")
        return report

    def _late(self, other: OtherEngineRank, what: str) -> EngineError:
        return EngineError(f"{other.name} took more than {self._deadline:.0f} s {what}")

    def _check(self) -> None:
        if self._error is not None:
            if threading.get_ident() == self._owner:  # else rank 0's own thread may still wait for ever
                self._noticed.set()
            raise self._error

    def _await_cause(self) -> None:
        """Raise what another rank failed with, if that is why rank 0 can't go on either."""
        until = time.monotonic() + _GRACE_S
        while self._error is None and time.monotonic() < until and self._watch.is_alive():
            self._watch.join(0.05)
        self._check()

    def _look(self) -> None:
        """Take reports, and see that no rank dies or stands still."""
        links: dict[object, OtherEngineRank] = {other.acts: other for other in self._others}
        while not self._closed.is_set():
            for link in wait(list(links), _LOOK_S):  # type: ignore[arg-type]
                if (error := self._take(links[link])) is not None:
                    self._fail(error)
                    return
            since = self._busy_since
            if since is not None and time.monotonic() - since > self._deadline:
                self._fail(self._standstill())
                return

    def _take(self, other: OtherEngineRank) -> EngineError | None:
        """Take the reports of a rank. Return why it has failed; None if it has not."""
        try:
            reports = _decode(other.acts.recv_bytes(_REPORT_BYTES))
        except msgspec.MsgspecError as error:
            return _unreadable(other, error)
        except BlockingIOError:
            return EngineError(f"{other.name} began a message, and did not end it")
        except (EOFError, OSError):
            return None if self._closed.is_set() else EngineError(f"{other.name} {other.how_it_ended()}")
        for report in reports:
            if isinstance(report, Refused):
                return _refusal(other, report)
            if not isinstance(report, Paced):
                other.reports.put(report)
        return None

    def _standstill(self) -> EngineError:
        behind = self._marks.behind(self._ranks)
        which = f"rank {', '.join(map(str, behind))} is behind" if behind else "all ranks are in it"
        where = ", ".join(f"{other.number}: {other.place}" for other in self._others)
        return EngineError(
            f"the ranks of the engine took more than {self._deadline:.0f} s to {self._doing}: {which} "
            f"(0: process {os.getpid()}, {where})"
        )

    def _fail(self, error: EngineError) -> None:
        """End this process unless its own thread notices: it may wait for the rank within a sum, for ever."""
        self._error = error
        for machine in self._machines:
            machine.drop()  # a patch on its way there would hold up the error
        for other in self._others:
            other.reports.put(None)
        if not self._noticed.wait(_GRACE_S) and not self._closed.is_set():
            with contextlib.suppress(OSError):  # the generator has ended, too
                engine_end.say(error)
            os._exit(1)


def _unreadable(other: OtherEngineRank, error: msgspec.MsgspecError) -> EngineError:
    return EngineError(f"{other.name} sends messages that can't be read: {error}")


def _refusal(other: OtherEngineRank, report: Refused) -> EngineError:
    failed = EngineError(f"{other.name}: {report.reason}")
    failed.lasting = report.lasting
    return failed
