"""Child processes that die with their parent, even if the parent is killed with kill -9."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from infra.supervise import lifeline

_STANDARD = 2  # descriptors up to it are input, output and errors
_TICKS = os.sysconf("SC_CLK_TCK")
_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def start_child(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, from a thread that lives as long as the process shall.

    The kernel kills the process when the *thread* that started it ends.
    """
    # A `preexec_fn` would tie it between fork and exec, where a child of threads can stand still for ever.
    tied = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
    process: subprocess.Popen[bytes] = subprocess.Popen([*tied, *argv], start_new_session=True, **options)
    _started.add(process)
    return process


def inherited_descriptors() -> list[int]:
    """Return what this process may pass on: descriptors that its parent passed to it, such as held locks."""
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which they were listed is closed
            if int(one.name) > _STANDARD and os.get_inheritable(int(one.name)):
                found.append(int(one.name))
    return found


def cpu_s() -> float:
    """Return the processor seconds of all children, also of those that have ended: it never falls."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(used_s(process) for process in list(_started))


def used_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor seconds of a process, with those of its ended children; 0 when it is gone."""
    if process.returncode is not None:
        return 0.0  # another process may have its number by now
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The name in brackets may hold blanks and brackets: what we need is behind the last one.
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(ticks) for ticks in fields[11:15]) / _TICKS
    return 0.0


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process started here with its process group, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
