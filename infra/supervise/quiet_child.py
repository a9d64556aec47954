"""A child process that takes orders through a pipe, and whose prints are shown only if it ends by itself."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import Pipe

import msgspec

from infra.code import module
from infra.supervise.argument_file import argument_file
from infra.supervise.children import kill, start_child
from schemas.shortening import printable

_SHOWN = 2_000  # characters


class ChildEnded(Exception):
    """A child ended by itself; the message says how, with its last lines."""


class QuietChild:
    """A module of ours as a process. Its arguments are descriptors: a file with `options`, and a pipe."""

    def __init__(self, name: str, options: msgspec.Struct, env: Mapping[str, str] | None = None) -> None:
        """`env`: variables besides those of this process."""
        self._name, self._options, self._env = name, options, env or {}

    def open(self) -> QuietChild:
        """Start the process. Return itself."""
        self._link, theirs = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115, closed in close
        with argument_file(msgspec.json.encode(self._options)) as said:
            self._process = start_child(
                [sys.executable, "-m", module(self._name), str(said), str(theirs.fileno())],
                pass_fds=[said, theirs.fileno()], env={**os.environ, **self._env},
                stdout=self._printed, stderr=self._printed,
            )  # fmt: skip
        theirs.close()
        return self

    def send(self, order: bytes) -> None:
        """Send an order."""
        with contextlib.suppress(OSError):  # it has ended: its last report says why
            self._link.send_bytes(order)

    def receive(self, wait_s: float | None) -> bytes | None:
        """Return its next report; None: it took longer. Raises ChildEnded."""
        if not self._link.poll(wait_s):
            return None
        try:
            return self._link.recv_bytes()
        except (EOFError, OSError):
            status = self._process.wait()
            raise ChildEnded(f"ended with status {status}; its last lines:\n{self._last_lines()}") from None

    def close(self) -> None:
        """End the process, and those that it started."""
        kill(self._process)
        self._link.close()
        self._printed.close()

    def _last_lines(self) -> str:
        self._printed.seek(max(0, self._printed.seek(0, 2) - _SHOWN))
        return printable(self._printed.read().decode(errors="replace"), _SHOWN)
