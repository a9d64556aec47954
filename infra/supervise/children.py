"""Child processes that die with their parent, even if the parent is killed with kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any

from infra.supervise.lifeline import die_with_parent


def start(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own. Call it from a thread that lives as long as the process shall:
    the kernel sends the signal when the *thread* that started the child ends."""
    parent = os.getpid()
    return subprocess.Popen(
        argv, start_new_session=True, preexec_fn=lambda: die_with_parent(parent), **options
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process started here, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
