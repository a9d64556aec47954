"""A rank's link to rank 0: a pipe each way on one machine, or a connection between two."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from typing import BinaryIO, Protocol

import msgspec

from consumers.ranks.rank_wire import Working
from infra.errors import Explained
from infra.ranks.frames import read_frame, write_frame

_TELL_S = 1.0
_GRACE_S = 10.0  # for this process to notice by itself that rank 0 is gone


class RankLink(Protocol):
    """Brings commands, and takes replies."""

    address: str  # of this machine, at which other ranks reach it; empty: that of rank 0

    def next(self) -> bytes | None:
        """Return the next command; None if rank 0 is gone."""

    def reply(self, data: msgspec.Struct) -> None:
        """Send a reply."""

    def is_lost(self, seconds: float) -> bool:
        """Return whether rank 0 is gone. Wait so long at most to find out."""


class PipeLink:
    """A pipe each way. This process ends with rank 0 anyhow, so nobody asks whether that is there."""

    address = ""

    def __init__(self, commands: BinaryIO, replies: BinaryIO) -> None:
        self._commands, self._replies = commands, replies

    def next(self) -> bytes | None:
        return read_frame(self._commands)

    def reply(self, data: msgspec.Struct) -> None:
        write_frame(self._replies, data)

    def is_lost(self, seconds: float) -> bool:
        return False


class ConnectionLink:
    """A connection. A thread reads it, so that the end of rank 0 is noticed while the learner computes.

    It says nothing before the first command: until then rank 0 looks for its end alone.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.address = str(connection.getsockname()[0])
        self._commands, self._replies = connection.makefile("rb"), connection.makefile("wb")
        self._found = queue.SimpleQueue[bytes | None]()
        self._lost, self._one_at_a_time = threading.Event(), threading.Lock()

    def open(self) -> ConnectionLink:
        """Listen, and say how much is computed. Return itself."""
        threading.Thread(target=self._listen, daemon=True, name="commands").start()
        return self

    def next(self) -> bytes | None:
        return self._found.get()

    def reply(self, data: msgspec.Struct) -> None:
        with self._one_at_a_time:
            write_frame(self._replies, data)

    def is_lost(self, seconds: float) -> bool:
        return self._lost.wait(seconds)

    def _listen(self) -> None:
        told = False
        try:
            while (frame := read_frame(self._commands)) is not None:
                if not told:
                    threading.Thread(target=self._tell, daemon=True, name="working").start()
                told = True
                self._found.put(frame)
        except (OSError, Explained) as error:
            sys.stderr.write(f"the connection to the trainer is lost: {error}\n")
        self._lost.set()
        self._found.put(None)
        time.sleep(_GRACE_S)
        os._exit(1)  # the main thread can be in a collective that never ends

    def _tell(self) -> None:
        while not self._lost.wait(_TELL_S):
            try:
                self.reply(Working(time.process_time()))
            except OSError:
                return  # whoever reads notices it, too
