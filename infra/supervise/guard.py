"""The process between a flow and its workers: `python -m infra.supervise.guard`.

    flow ──stdin: commands, one JSON a line──► guard ──starts──► workers, each in a process group of its own
         ◄──stdout: events, one JSON a line──

    the flow ends, however  ──► end of stdin ──► SIGTERM to all workers, SIGKILL after a grace, guard ends
    the guard ends, however ──► the kernel kills the workers (PR_SET_PDEATHSIG)

Commands: {"do": "start", "name", "argv", "env", "log"}, {"do": "stop", "name", "grace_s"}.
Events: {"event": "started", "name", "pid"}, {"event": "exited", "name", "code", "signal"},
{"event": "failed", "name", "error"} for a worker that could not be started.

The guard has one thread, because the parent-death signal follows the thread that made the child. It imports
the standard library only, so that it starts within milliseconds and little can fail.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from infra.supervise.lifeline import adopt_orphans, children_of, die_with_parent


@dataclass
class _Worker:
    name: str
    pid: int
    kill_at: float | None = None  # monotonic; set once it was told to stop
    killed: bool = False


@dataclass
class _Guard:
    grace_s: float
    workers: dict[int, _Worker] = field(default_factory=dict)
    ending: bool = False

    def serve(self) -> None:
        """Serve until stdin has ended and every worker is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(_wake_on_signals(), selectors.EVENT_READ)
            commands = _Lines(0)
            while True:
                for key, _ in selector.select(self._patience()):
                    if key.fd == 0 and not self.ending:
                        for line in commands.read():
                            self._obey(line)
                    elif key.fd != 0:
                        os.read(key.fd, 512)
                if (commands.ended or _told_to_end) and not self.ending:
                    selector.unregister(0)
                    self._end_all()
                self._reap()
                self._kill_the_late()
                if self.ending and not self.workers:
                    return

    def _obey(self, line: bytes) -> None:
        command: dict[str, Any] = json.loads(line)
        if command["do"] == "start":
            self._start(command)
            return
        for worker in self.workers.values():
            if worker.name == command["name"]:
                self._stop(worker, float(command["grace_s"]))

    def _start(self, command: dict[str, Any]) -> None:
        name = command["name"]
        try:
            with _log(command["log"]) as log:
                child = subprocess.Popen(
                    command["argv"],
                    env=command["env"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    preexec_fn=_before_exec(os.getpid()),  # safe: there is one thread
                )
        except (OSError, subprocess.SubprocessError) as error:
            _tell(event="failed", name=name, error=str(error))
            return
        child.returncode = 0  # we wait for it ourselves; the object must not try
        self.workers[child.pid] = _Worker(name, child.pid)
        _tell(event="started", name=name, pid=child.pid)

    def _stop(self, worker: _Worker, grace_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGTERM)
        kill_at = time.monotonic() + grace_s
        worker.kill_at = min(worker.kill_at or kill_at, kill_at)

    def _end_all(self) -> None:
        self.ending = True
        for worker in self.workers.values():
            self._stop(worker, self.grace_s)

    def _kill_the_late(self) -> None:
        now = time.monotonic()
        for worker in self.workers.values():
            if worker.kill_at is not None and worker.kill_at <= now and not worker.killed:
                worker.killed = True
                _kill_group(worker.pid)

    def _patience(self) -> float | None:
        times = [w.kill_at for w in self.workers.values() if w.kill_at is not None and not w.killed]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _reap(self) -> None:
        for pid, status in _ended_children(self.workers):
            worker = self.workers.pop(pid, None)
            if worker is not None:
                code = os.waitstatus_to_exitcode(status)
                _tell(event="exited", name=worker.name, code=max(code, 0), signal=max(-code, 0))


_told_to_end = False


def _wake_on_signals() -> int:
    """Return a descriptor that becomes readable when a child has ended or the guard was told to end."""

    def told(*_: object) -> None:
        global _told_to_end
        _told_to_end = True

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGHUP, told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the flow's to handle
    return reading


def _log(path: str) -> BinaryIO:
    """Open a worker's log. On a disk that is full or read-only the worker goes without a log."""
    try:
        return open(path, "ab")  # noqa: PTH123 - nothing but built-ins before an exec
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        return open(os.devnull, "ab")  # noqa: PTH123


def _before_exec(guard: int) -> Any:
    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an ignored signal would stay ignored after exec
        die_with_parent(guard)

    return prepare


def _ended_children(workers: dict[int, _Worker]) -> Iterator[tuple[int, int]]:
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid in workers:
            # Until the worker is reaped, no other process group can have got its number.
            _kill_group(ended.si_pid)
        yield os.waitpid(ended.si_pid, 0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_orphans() -> None:
    """Kill the processes that workers left in sessions of their own; the guard has adopted them."""
    while True:
        for pid in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _tell(**event: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more: stdin will end too
        os.write(1, json.dumps(event).encode() + b"\n")


class _Lines:
    """Reads whole lines from a descriptor that may deliver them in pieces."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def read(self) -> list[bytes]:
        data = os.read(self._descriptor, 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def main() -> int:
    """Serve until stdin ends. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m infra.supervise.guard", description=__doc__)
    parser.add_argument("--grace-s", type=float, default=10.0, help="between SIGTERM and SIGKILL at the end")
    adopt_orphans()
    guard = _Guard(parser.parse_args().grace_s)
    guard.serve()
    _kill_orphans()
    return 0


if __name__ == "__main__":
    sys.exit(main())
