"""Processes that outlive the command that started them, and ways to end all of them for sure."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.boot_id import boot_id
from infra.files.ends import tail
from infra.files.private import make_private
from infra.stack.stack_errors import Cancelled, ToolFailed, ToolMissing, WouldNotStop

# Every process of a service carries this variable, and its children inherit it. By it we find a child that
# left the process group, and a service whose starter was killed before it wrote the state file.
SERVICE_VARIABLE = "STREAMRL_SERVICE"

# State files of older releases have only the pid and the time of birth. That time is computed from the boot
# time, which moves when the clock is set.
BIRTH_TOLERANCE_S = 2.0
_START_TICKS = 19  # place in /proc/PID/stat, counted from the field behind the name

# Our own children must be waited for when they end, or they stay as zombies while this process lives.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True)
class Identity:
    pid: int
    created: float  # seconds since 1970, by the clock as it was then
    birth: str = ""  # by no clock that can be set, see `_birth`; empty: an older release started the process


def spawn(command: Sequence[str], *, env: Mapping[str, str], log: Path, mark: str, cwd: Path) -> Identity:
    """Start a command in a session of its own, so that Ctrl-C in this terminal does not reach it."""
    make_private(log.parent)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env={**env, SERVICE_VARIABLE: mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children[child.pid] = child
    return Identity(child.pid, psutil.Process(child.pid).create_time(), _birth(child.pid))


def is_alive(identity: Identity) -> bool:
    _reap()
    try:
        process = psutil.Process(identity.pid)
        if identity.birth:
            is_same = _birth(identity.pid) == identity.birth
        else:
            is_same = abs(process.create_time() - identity.created) < BIRTH_TOLERANCE_S
        return is_same and not _has_ended(process)
    except psutil.NoSuchProcess:
        return False


def _birth(pid: int) -> str:
    """Return the start of the machine, and the ticks from there to the start of a process; empty: not known.

    A pid may belong to another process by now; pid and birth together do not, however the clock is set.
    """
    try:
        # The name in brackets may hold blanks and brackets: what we need is behind the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{boot_id()} {fields[_START_TICKS]}"
    except (OSError, IndexError):
        return ""


def members(identity: Identity | None, mark: str) -> list[psutil.Process]:
    """Return all processes of a service: its process group, and all that carry its mark."""
    group = identity.pid if identity is not None and is_alive(identity) else None
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            in_group = group is not None and os.getpgid(process.pid) == group
            if (in_group or process.environ().get(SERVICE_VARIABLE) == mark) and not _has_ended(process):
                found.append(process)
    return found


def end(identity: Identity | None, mark: str, *, grace_s: float) -> int:
    """Send SIGTERM, after `grace_s` SIGKILL. Return how many processes there were; raise if one is left."""
    found = members(identity, mark)
    ended = len(found)
    left = _signal_and_wait(found, signal.SIGTERM, grace_s)
    # What was started while we waited carries the mark too.
    for _ in range(3):
        left = [*left, *(p for p in members(identity, mark) if p not in left)]
        if not left:
            _reap()
            return ended
        left = _signal_and_wait(left, signal.SIGKILL, 10.0)
    raise WouldNotStop(
        f"processes {[p.pid for p in left]} of {mark} outlived SIGKILL",
        fix="they hang in the kernel, mostly on a disk: see dmesg; a reboot ends them",
    )


def run_tool(
    command: Sequence[str],
    *,
    log: Path,
    deadline_s: float,
    cancel: threading.Event,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a helper (mvn, go, StorageTool) to its end; kill it at the deadline or when the user cancels."""
    make_private(log.parent)
    name = Path(command[0]).name
    with log.open("ab") as output:
        try:
            child = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ToolMissing(f"{name} was not found", fix=f"install {name} and put it on the PATH") from None
    until = time.monotonic() + deadline_s
    try:
        while child.poll() is None:
            if cancel.wait(0.05):
                raise Cancelled(f"cancelled while {name} ran", fix="run the command again")
            if time.monotonic() > until:
                raise ToolFailed(
                    f"{name} did not end within {deadline_s:.0f} s: {' '.join(command)}\n{tail(log)}",
                    fix=f"read {log}; it may wait for the network",
                )
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode != 0:
        raise ToolFailed(
            f"{name} ended with status {child.returncode}: {' '.join(command)}\n{tail(log)}",
            fix=f"read {log}",
        )


def _signal_and_wait(
    processes: list[psutil.Process], number: signal.Signals, grace_s: float
) -> list[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    until = time.monotonic() + grace_s
    left = processes
    while left and time.monotonic() < until:
        _reap()
        left = [p for p in left if p.is_running() and not _has_ended(p)]
        if left:
            time.sleep(0.02)
    return left


def _has_ended(process: psutil.Process) -> bool:
    """Return whether nothing is left of a process but an entry that its parent has not read.

    A killed JVM is a zombie as soon as its first thread is gone, while its other threads still hold its port
    and the lock on its data. A service started anew at that moment would get another port, where no client
    looks for it.
    """
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
    except psutil.NoSuchProcess:
        return True
    try:
        return len(list(Path(f"/proc/{process.pid}/task").iterdir())) <= 1
    except OSError:
        return True


def _reap() -> None:
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            _children.pop(pid, None)
