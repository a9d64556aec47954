"""Start, command and watch the processes of the other ranks, from rank 0.

A rank that ends unasked ends the trainer. If the trainer talks to that rank, it meets a closed pipe or
connection, and raises an error that says which rank it was and how it ended. If it waits for something else,
or hangs in a GPU collective, the watching thread ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from consumers.learners import collective
from consumers.learners.collective import RanksError
from consumers.learners.optimizing import NotFinite
from consumers.ranks.rank_wire import Command, CommandDone, Failed, Reply, Setup, read_frame, write_frame
from infra.code import ROOT, module
from infra.errors import Explained
from infra.supervise import children
from infra.waiting import Wait, WaitedTooLong
from schemas.runspec import RunSpec

_GRACE_S = 5.0  # for the trainer to notice by itself, and for ranks to end
_BUSY_S = 0.1  # of processor time in a second: a rank that uses more computes; an open connection costs less
_TAIL = 15  # lines of a rank's log in an error


class RankDied(RanksError):
    """Raised when a rank ended unasked; the message says which one, how, and its last lines."""


class RankFailed(RanksError):
    """Raised when a rank met an error. `batch`: index in the command of the failed micro-batch, or -1."""

    def __init__(self, number: int, failed: Failed) -> None:
        super().__init__(f"rank {number}: {failed.reason}")
        self.number, self.batch, self.reason = number, failed.batch, failed.reason


class _Member:
    """The process of one rank. Its log is written to our stderr; the last lines are kept."""

    def __init__(self, number: int, died: threading.Event) -> None:
        self.number = number
        self.ended, self.ended_at = threading.Event(), 0.0
        self._died, self._tail = died, deque[str](maxlen=_TAIL)

    def open(self) -> _Member:
        """Start the process. Return itself."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = children.start_child(
            [sys.executable, "-m", module("consumers.ranks.rank")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        threading.Thread(target=self._follow, daemon=True, name=f"rank-{self.number}").start()
        return self

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace")
            self._tail.append(text)
            sys.stderr.write(text)
        self.process.wait()
        self.ended_at = time.monotonic()
        self.ended.set()
        self._died.set()

    def send(self, data: msgspec.Struct) -> None:
        assert self.process.stdin is not None
        write_frame(self.process.stdin, data)  # type: ignore[arg-type]

    def reply(self, deadline_s: float) -> CommandDone:
        """Return the reply to the last command. The deadline counts only while the rank uses no processor."""
        assert self.process.stdout is not None
        what = f"rank {self.number} (process {self.process.pid})"
        wait, used = Wait(f"a reply of {what}", unblocked_by="that process", deadline_s=deadline_s), 0.0
        while not select.select([self.process.stdout], [], [], min(1.0, deadline_s))[0]:
            if not deadline_s:
                raise WaitedTooLong(f"{what} has not answered yet")
            before, used = used, children.used_s(self.process)
            wait.progress() if used - before > _BUSY_S else wait.check()
        frame = read_frame(self.process.stdout)  # type: ignore[arg-type]
        if frame is None:
            raise EOFError
        reply: Reply = msgspec.msgpack.decode(frame, type=Reply)
        if isinstance(reply, Failed):
            raise RankFailed(self.number, reply)
        return reply

    def obituary(self) -> RanksError:
        """Return the error that tells why the rank ended."""
        with contextlib.suppress(EOFError, WaitedTooLong):
            while True:
                try:
                    self.reply(0.0)  # drop replies to earlier commands
                except RankFailed as failed:
                    return failed
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = "".join(self._tail).rstrip() or "(nothing)"
        return RankDied(f"rank {self.number} (process {self.process.pid}) {how}; its last lines:\n{said}")


class RankProcesses:
    """The processes of all ranks but rank 0."""

    def __init__(self, model: str, spec: RunSpec, *, run: str, log: logging.Logger) -> None:
        self._deadlines, self._log = spec.deadlines, log
        self._place = collective.meeting_place(spec.trainer.ranks)
        self._ranks = spec.trainer.ranks
        self._died, self._known = threading.Event(), threading.Event()
        self._members: list[_Member] = []
        self._setup = lambda number: Setup(
            run, model, spec.model_dump_json(), number, self._ranks, self._place.port
        )

    def open(self) -> RankProcesses:
        """Start the processes. Return itself."""
        self._members = [_Member(number, self._died).open() for number in range(1, self._ranks)]
        with self.watched():
            for member in self._members:
                member.send(self._setup(member.number))
        if self._members:
            threading.Thread(target=self._watch, daemon=True, name="ranks").start()
        return self

    def join(self) -> None:
        """Join the process group as rank 0."""
        for member in self._members:  # a rank that can't start says so here, before anyone waits for it
            member.reply(self._deadlines.start_s)
        collective.join_ranks(0, self._ranks, self._place, self._deadlines.start_s)

    def send(self, rank: int, command: Command) -> None:
        """Send a command to one rank. The caller must take its reply."""
        self._members[rank - 1].send(command)

    def send_all(self, command: Command) -> None:
        """Send a command to all ranks."""
        for member in self._members:
            member.send(command)

    def replies(self) -> list[CommandDone]:
        """Return the reply of each rank to the last command, in order of rank."""
        return [member.reply(self._deadlines.progress_s) for member in self._members]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace errors in this context by one that tells of a rank's end, if that explains them."""
        try:
            yield
        except (RankFailed, NotFinite):  # other ranks may end of it too: that is not reported again
            self._known.set()
            raise
        except (RuntimeError, OSError, EOFError) as error:  # a collective, a pipe, the end of a pipe
            if isinstance(error, Explained) or not self._died.wait(_GRACE_S):
                raise
            self._known.set()
            raise self._obituary() from error

    def _obituary(self) -> RanksError:
        gone = [member for member in self._members if member.ended.is_set()]
        return min(
            gone, key=lambda member: member.ended_at
        ).obituary()  # the others lost the connection to it

    def _watch(self) -> None:
        """End the trainer, wherever it is, when a rank has ended unasked."""
        self._died.wait()
        if self._known.wait(_GRACE_S):
            return
        self._log.error("%s", self._obituary())
        os._exit(1)  # the main thread can be in a collective that never ends

    def close(self) -> None:
        """End all ranks."""
        self._known.set()
        for member in self._members:
            assert member.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                member.process.stdin.close()
        for member in self._members:
            member.ended.wait(_GRACE_S)
            children.kill(member.process)
