"""A rank of another machine: a connection that it opened, and a thread that reads what it says."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import msgspec

from consumers.ranks.member import OtherRank
from consumers.ranks.rank_hello import Hello
from consumers.ranks.rank_wire import FarReply, Reply, Working
from infra.errors import Explained
from infra.ranks.frames import read_frame, write_frame
from infra.ranks.waiting_room import is_closed


class FarMember(OtherRank):
    """A rank that was let in. `address`: of its machine."""

    def __init__(self, connection: socket.socket, address: str, hello: Hello, died: threading.Event) -> None:
        super().__init__(0, died)
        self.address, self.local = address, hello.local
        self._connection, self._file = connection, connection.makefile("rwb")
        self._replies = queue.SimpleQueue[Reply | None]()
        self._next: list[Reply | None] = []
        self._used, self._why = 0.0, "closed its connection"

    def open(self, number: int) -> FarMember:
        """Give the rank its number, and listen to it. Return itself."""
        self.number = number
        threading.Thread(target=self._listen, daemon=True, name=f"rank-{number}").start()
        return self

    @property
    def name(self) -> str:
        return f"rank {self.number} (on {self.address})"

    @property
    def is_gone(self) -> bool:
        """Whether a rank that was not yet given a number has closed its connection."""
        return is_closed(self._connection)

    def _listen(self) -> None:
        try:
            while (frame := read_frame(self._file)) is not None:  # type: ignore[arg-type]
                said = msgspec.msgpack.decode(frame, type=FarReply)
                if isinstance(said, Working):
                    self._used = said.used_s
                else:
                    self._replies.put(said)
        except ConnectionError:
            pass  # it closed the connection before it had read all
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError, Explained) as error:
            self._why = f"is lost: {error}"
        # leads to the place in that log; and a trainer that ends twice with the same words is not restarted
        self._why += time.strftime(" at %H:%M:%S")
        self._has_ended()
        self._replies.put(None)

    def send(self, data: msgspec.Struct, deadline_s: float) -> None:
        """Send a command. The connection has a deadline of its own."""
        write_frame(self._file, data)  # type: ignore[arg-type]

    def _comes(self, seconds: float) -> bool:
        if not self._next:
            with contextlib.suppress(queue.Empty):
                self._next.append(self._replies.get(timeout=max(seconds, 1e-3)))
        return bool(self._next)

    def _reply(self) -> Reply | None:
        found = self._next.pop()
        if found is None:
            self._next.append(None)  # it stays gone
        return found

    def has_said(self) -> bool:
        return any(self._next) or self._replies.qsize() > 1  # the last one is the end

    def _used_s(self) -> float:
        return self._used

    def how(self) -> str:
        return f"{self._why}; its machine's log says why"

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self, grace_s: float) -> None:
        self.ended.wait(grace_s)
        self.drop()

    def drop(self) -> None:
        """Close the connection. Whoever reads it finds its end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
