"""The flow's side of the guard: starts workers, stops them, and learns how they ended.

    with Team(logs) as team:
        team.start("trainer", [sys.executable, "-m", "consumers.trainer", ...])
        for ended in team.poll(0.5): ...

Leaving the block ends every worker. So does any other end of this process: see `infra.supervise.guard`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from infra.code import ROOT, module
from infra.errors import Explained
from infra.files.private import make_private
from infra.supervise.last_words import LAST_WORDS_VARIABLE, take_last_words
from infra.supervise.lifeline import carrying
from schemas.shortening import printable

TEAM_VARIABLE = "STREAMRL_TEAM"
_KILLED = "somebody killed it, or the kernel did, which happens when memory is short (`dmesg` says so)"
_GONE_S = 10.0  # for killed processes to be gone


class SuperviseError(Explained):
    """Workers can't be supervised; the message says what happened and what to do."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker. `asked`: the worker had been told to stop."""

    name: str
    pid: int
    code: int
    signal: int
    asked: bool
    log: Path
    last_lines: str
    error: str = ""  # the error that the worker ended by, as it said itself; empty: it said none

    @property
    def how(self) -> str:
        """The way in which the worker ended, in words."""
        if self.signal:
            return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with exit code {self.code}"

    @property
    def words(self) -> str:
        """The worker's own last words: its error, else the last line of its log."""
        if self.signal and not self.error:
            return _KILLED if self.signal == signal.SIGKILL else ""  # its log says nothing of that
        return self.error or printable(self.last_lines.rpartition("\n")[2])

    @property
    def story(self) -> str:
        """The way in which the worker ended, with its last words and the place of its log."""
        words = f": {self.words}" if self.words else ""
        return f"{self.name} (process {self.pid}) {self.how}; its log is {self.log}{words}"


class GuardDied(SuperviseError):
    """The guard ended without being asked to. Its workers, in `lost`, ended with it."""

    def __init__(self, message: str, lost: Sequence[Ended] = ()) -> None:
        super().__init__(message)
        self.lost = tuple(lost)


class Team:
    """The workers of one flow."""

    def __init__(self, logs: Path, *, grace_s: float = 10.0, holds: Sequence[int] = ()) -> None:
        """`holds`: descriptors of locks, which are let go of only when every worker is gone."""
        self._logs, self._grace_s, self._holds = logs, grace_s, tuple(holds)
        self._mark = f"{TEAM_VARIABLE}={uuid.uuid4().hex}"
        self._guard: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._pids: dict[str, int] = {}
        self._asked: set[str] = set()

    def __enter__(self) -> Team:
        make_private(self._logs)
        self._guard = self._new_guard()
        return self

    def renew(self) -> None:
        """Start another guard in place of one that died. It holds the same locks, and has no workers yet."""
        self._alive().wait(_GONE_S)
        for pipe in (self._alive().stdin, self._alive().stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._rest = b""
        self._guard = self._new_guard()

    def _new_guard(self) -> subprocess.Popen[bytes]:
        with (self._logs / "guard.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module("infra.supervise.guard"), "--grace-s", str(self._grace_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(),
                pass_fds=self._holds,
                start_new_session=True,  # Ctrl-C in the terminal goes to the flow alone
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None and guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.close()  # from here on the guard ends all, whatever happens to this process
        try:
            guard.wait(self._grace_s + 10)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
        finally:
            guard.stdout.close()
        if guard.returncode:
            self._sweep()

    @property
    def running(self) -> dict[str, int]:
        """Process ids of the running workers, by name."""
        return dict(self._pids)

    @property
    def guard_pid(self) -> int:
        """The guard's process id."""
        return self._alive().pid

    def log(self, name: str) -> Path:
        """Return the file for a worker's output. A worker that is started again appends to the same file."""
        return self._logs / f"{name}.log"

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Start a worker and return its process id. `env` is added to this process's environment.

        Raise SuperviseError if the worker runs already or can't be started within 30 s.
        """
        if name in self._pids:
            raise SuperviseError(f"{name} runs already, as process {self._pids[name]}")
        variable, _, value = self._mark.partition("=")
        words = self._words(name)
        words.unlink(missing_ok=True)
        environment = worker_environment() | dict(env or {})
        environment |= {variable: value, LAST_WORDS_VARIABLE: str(words)}
        self._asked.discard(name)
        self._command(do="start", name=name, argv=list(argv), env=environment, log=str(self.log(name)))
        deadline = time.monotonic() + 30.0
        pending: list[dict[str, Any]] = []
        try:
            while time.monotonic() < deadline:
                for event in self._events(0.5):
                    if event["event"] == "exited" or event["name"] != name:
                        pending.append(event)
                    elif event["event"] == "failed":
                        raise SuperviseError(f"{name} can't be started: {event['error']} ({argv[0]})")
                    else:
                        self._pids[name] = int(event["pid"])
                if name in self._pids:
                    return self._pids[name]
        finally:
            self._put_back(pending)
        raise SuperviseError(f"{name} was not started within 30 s: see {self._logs / 'guard.log'}")

    def stop(self, name: str, grace_s: float | None = None) -> None:
        """Tell a worker to stop; it is killed after the grace (None: the team's). `poll` reports its end."""
        if name in self._pids:
            self._asked.add(name)
            grace = self._grace_s if grace_s is None else grace_s
            self._command(do="stop", name=name, grace_s=grace)

    def poll(self, wait_s: float = 0.0) -> list[Ended]:
        """Return the workers that have ended; wait up to `wait_s` for the first one. Raise GuardDied."""
        ended = []
        for event in self._events(wait_s):
            name = event["name"]
            pid = self._pids.pop(name, 0)
            asked = name in self._asked
            error = take_last_words(self._words(name))
            ended.append(
                Ended(
                    name, pid, event["code"], event["signal"], asked, self.log(name), self.tail(name), error
                )
            )
        return ended

    def _words(self, name: str) -> Path:
        return self._logs.absolute() / f"{name}.words"

    def tail(self, name: str, lines: int = 15) -> str:
        """Return the last lines of a worker's log; empty if it can't be read."""
        try:
            with self.log(name).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                text = file.read(16_384).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _alive(self) -> subprocess.Popen[bytes]:
        if self._guard is None:
            raise SuperviseError("a Team is used in a `with` block")
        return self._guard

    def _command(self, **command: Any) -> None:
        stdin = self._alive().stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._guard_died() from None

    def _put_back(self, events: list[dict[str, Any]]) -> None:
        self._rest = b"".join(json.dumps(event).encode() + b"\n" for event in events) + self._rest

    def _events(self, wait_s: float) -> list[dict[str, Any]]:
        stdout = self._alive().stdout
        assert stdout is not None
        if b"\n" not in self._rest:
            ready, _, _ = select.select([stdout], [], [], wait_s)
            if not ready:
                return []
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                raise self._guard_died()
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def _guard_died(self) -> GuardDied:
        guard = self._alive()
        code = guard.wait(30)
        self._sweep()
        names = ", ".join(self._pids) or "none"
        lost = [
            Ended(name, pid, 0, signal.SIGKILL, name in self._asked, self.log(name), self.tail(name))
            for name, pid in self._pids.items()
        ]
        self._pids.clear()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return GuardDied(
            f"the guard (process {guard.pid}) {how}, and with it its workers ({names}); "
            f"its log is {self._logs / 'guard.log'}",
            lost,
        )

    def _sweep(self) -> None:
        """After the guard's end: kill all that the workers had started, for 10 s at most."""
        until = time.monotonic() + _GONE_S
        while found := list(carrying(self._mark)):
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                return
            time.sleep(0.02)


def worker_environment() -> dict[str, str]:
    """Return this process's environment, changed so that `python -m` finds our rooms before other folders.

    A user's folders `infra` or `schemas` in the current folder must not hide ours. A task that is a module in
    the current folder must nevertheless be found.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(Path.cwd())]
    return {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        "PYTHONUNBUFFERED": "1",
    }
