"""A rank on the trainer's machine: a process that rank 0 starts, with a pipe each way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
from collections import deque

import msgspec

from consumers.ranks.member import OtherRank
from consumers.ranks.rank_wire import Reply
from infra.code import child_environment, module
from infra.ranks.frames import frame_of, read_frame
from infra.supervise import children

_TAIL = 15  # lines of a rank's log in an error
_LAST_LINES_S = 2.0  # for those to come; a process of the rank's own may hold its stderr open for long


class LocalMember(OtherRank):
    """The process of one rank. Its log is written to our stderr; the last lines are kept."""

    def __init__(self, number: int, died: threading.Event) -> None:
        super().__init__(number, died)
        self._tail = deque[str](maxlen=_TAIL)

    def open(self) -> LocalMember:
        """Start the process. Return itself."""
        self.process = children.start_child(
            [sys.executable, "-m", module("consumers.ranks.rank")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=child_environment(),
        )  # fmt: skip
        name = f"rank-{self.number}"
        reader = threading.Thread(target=self._follow, daemon=True, name=f"{name}-log")
        reader.start()
        threading.Thread(target=self._await_end, args=[reader], daemon=True, name=name).start()
        return self

    @property
    def name(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            text = line.decode(errors="replace")
            self._tail.append(text)
            sys.stderr.write(text)

    def _await_end(self, reader: threading.Thread) -> None:
        self.process.wait()
        reader.join(_LAST_LINES_S)
        self._has_ended()

    def send(self, data: msgspec.Struct, deadline_s: float) -> None:
        assert self.process.stdin is not None
        pipe, left = self.process.stdin.fileno(), memoryview(frame_of(data))
        os.set_blocking(pipe, False)  # a process that was stopped takes nothing, and a pipe is full soon
        while left:
            self._wait(
                lambda seconds: bool(select.select([], [pipe], [], seconds)[1]),
                f"{self.name} to take a command", deadline_s,
            )  # fmt: skip
            left = left[os.write(pipe, left) :]

    def _comes(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def _reply(self) -> Reply | None:
        assert self.process.stdout is not None
        frame = read_frame(self.process.stdout)  # type: ignore[arg-type]
        return None if frame is None else msgspec.msgpack.decode(frame, type=Reply)

    def has_said(self) -> bool:
        assert self.process.stdout is not None
        unread = fcntl.ioctl(self.process.stdout, termios.FIONREAD, bytes(4))
        return any(unread)

    def _used_s(self) -> float:
        return children.used_s(self.process)

    def how(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        said = "".join(self._tail).rstrip() or "(nothing)"
        return f"{how}; its last lines:\n{said}"

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, grace_s: float) -> None:
        self.ended.wait(grace_s)
        children.kill(self.process)
