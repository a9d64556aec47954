"""The door of a rank 0 for ranks of other machines: it says where it is, and lets in those that know the key.

runs/<run>/<meeting>.json ──► a rank elsewhere ── connects, handshake ──► `took` is told who it is

Strangers who connect and say nothing keep nobody out: when there are too many, one has to go, the oldest from
the address that has the most. A rank shows within a round trip or two that it knows the key.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from infra.errors import Explained
from infra.ranks.handshake import NotLetIn, let_in
from infra.ranks.rendezvous import Rendezvous

_MOST_AT_ONCE = 64  # connections whose handshake goes on
_AGAIN_S = 1.0
_TELL_S = 10.0  # strangers may come by the thousand: so often one is named, and the others are counted

_Hello = TypeVar("_Hello")


class Doorway(Generic[_Hello]):
    """Listens on one address, and shakes hands with whoever comes."""

    def __init__(
        self, host: str, hello: msgspec.msgpack.Decoder[_Hello],
        took: Callable[[socket.socket, str, _Hello], None], log: logging.Logger,
    ) -> None:  # fmt: skip
        """`took`: gets the connection, the address and the first frame of each rank that was let in.

        It is called in a thread, and raises an error that is Explained to send the rank away.
        """
        self.host, self._hello, self._took, self._log = host, hello, took, log
        self._handshakes = threading.Semaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        # those who have not shown that they know the key, and their addresses, by age
        self._strangers: dict[socket.socket, str] = {}
        self._unsaid, self._said_at = 0, float("-inf")
        self._closed = threading.Event()
        self._listening: socket.socket | None = None

    def open(self, announce: Callable[[int], Rendezvous]) -> Doorway[_Hello]:
        """Listen. Return itself. `announce`: writes down that ranks are let in at a port, by a new key."""
        listening = socket.create_server((self.host, 0), backlog=2 * _MOST_AT_ONCE)
        try:
            self.announced = announce(listening.getsockname()[1])
        except BaseException:
            listening.close()
            raise
        self._listening = listening
        threading.Thread(target=self._accept, args=(listening,), daemon=True, name="doorway").start()
        return self

    def close(self) -> None:
        """Stop listening, if it was opened."""
        self._closed.set()
        if self._listening is None:
            return
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        self._listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed.is_set():
            try:
                connection, (address, *_) = listening.accept()
            except OSError as error:  # such as too many open files
                if not self._closed.wait(_AGAIN_S):
                    self._log.warning("a connection to %s could not be taken: %s", self.host, error)
                continue
            if not self._handshakes.acquire(blocking=False):
                self._send_one_away()
                if not self._handshakes.acquire(timeout=1.0):
                    connection.close()
                    continue
            with self._lock:
                self._strangers[connection] = str(address)
            threading.Thread(
                target=self._greet, args=(connection, str(address)), daemon=True, name="handshake"
            ).start()

    def _send_one_away(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._strangers:
                return
            # else a flood from one address would push out all ranks that are far away
            ((crowd, _),) = Counter(self._strangers.values()).most_common(1)
            oldest = next(one for one, address in self._strangers.items() if address == crowd)
            del self._strangers[oldest]
            oldest.shutdown(socket.SHUT_RDWR)  # its thread, which waits for words, ends

    def _is_stranger(self, connection: socket.socket) -> bool:
        """Take a connection out of the strangers. Return whether it was among them, and not sent away."""
        with self._lock:
            return self._strangers.pop(connection, None) is not None

    def _greet(self, connection: socket.socket, address: str) -> None:
        known = False
        try:
            hello = let_in(connection, bytes.fromhex(self.announced.key), self._hello)
            known = self._is_stranger(connection)
            if not known:
                raise NotLetIn("it was sent away, as too many came after it")
            self._took(connection, address, hello)
        except (OSError, ValueError, Explained) as error:
            self._tell(address, error, known)
            connection.close()
        finally:
            self._is_stranger(connection)
            self._handshakes.release()

    def _tell(self, address: str, error: Exception, known: bool) -> None:
        others = ""
        if not known:
            with self._lock:
                if time.monotonic() - self._said_at < _TELL_S:
                    self._unsaid += 1
                    return
                others = f"; nor were {self._unsaid} before it" if self._unsaid else ""
                self._unsaid, self._said_at = 0, time.monotonic()
        self._log.warning("a connection from %s was not let in: %s%s", address, error, others)
