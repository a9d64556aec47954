"""The trainer's door for ranks of other machines: it says where it is, and lets in those that know the key.

runs/<run>/ranks.json ──► a rank elsewhere ── connects, handshake ──► waits here until all have come
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from consumers.learners.collective import WrongAddress, interface_of
from consumers.ranks import rendezvous
from consumers.ranks.far_member import FarMember
from consumers.ranks.frames import write_frame
from consumers.ranks.handshake import NotLetIn, let_in, versions
from consumers.ranks.rank_wire import Failed
from infra.errors import Explained
from infra.runs import RunRecord
from infra.stores.store import Store
from infra.waiting import Wait

_LOOK_S = 0.5
_MOST_AT_ONCE = 64  # connections whose handshake goes on


class Doorway:
    """Listens on one address until so many ranks have come as the run file places elsewhere."""

    def __init__(self, store: Store, record: RunRecord, log: logging.Logger) -> None:
        ranks = record.spec.placement.ranks
        self.wanted, self._store, self._record, self._log = ranks.elsewhere, store, record, log
        self.host = _resolved(ranks.address)
        interface_of(self.host)  # names the setting if this machine has no such address
        self._come: list[FarMember] = []
        self._changed, self._shut = threading.Condition(), False
        self._handshakes = threading.Semaphore(_MOST_AT_ONCE)

    def open(self, died: threading.Event) -> Doorway:
        """Listen, and write down where. `died`: set when a rank ends. Return itself."""
        self._died = died
        self._listening = socket.create_server((self.host, 0), backlog=self.wanted + _MOST_AT_ONCE)
        try:
            at = rendezvous.announce(self._store, self._record, self.host, self._listening.getsockname()[1])
        except BaseException:
            self._listening.close()
            raise
        self._key = bytes.fromhex(at.key)
        threading.Thread(target=self._accept, daemon=True, name="doorway").start()
        return self

    def members(self, deadline_s: float) -> list[FarMember]:
        """Return the ranks when all have come, those of one machine in a row. Nobody is let in after that."""
        run = self._record.id
        wait = Wait(
            f"{self.wanted} ranks of other machines at {self.host}",
            unblocked_by=f"`streamrl join {run} --store {self._record.store} --ranks {self.wanted}` there",
            deadline_s=deadline_s,
        )  # fmt: skip
        self._log.info("waiting for %s (%s)", wait.what, wait.unblocked_by)
        try:
            with self._changed:
                while len(self._here()) < self.wanted:
                    if self._died.is_set():
                        raise EOFError  # a rank of this machine: its end is told
                    wait.check()
                    self._changed.wait(_LOOK_S)
                self._shut = True
                self._come.sort(key=lambda one: (one.address, one.local))
                chosen, spare = self._come[: self.wanted], self._come[self.wanted :]
                self._come = []
        finally:
            self.close()
        for one in spare:
            one.drop()  # it tries again, and takes the place of one that ends
        return chosen

    def close(self) -> None:
        """Stop listening, and send those away who wait."""
        with self._changed:
            self._shut = True
            left, self._come = self._come, []
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        self._listening.close()
        for one in left:
            one.drop()

    def _here(self) -> list[FarMember]:
        for one in [one for one in self._come if one.is_gone]:
            self._come.remove(one)
            one.drop()
        return self._come

    def _accept(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listening.accept()
            except OSError:
                return  # it is closed
            if not self._handshakes.acquire(timeout=1.0):
                connection.close()
                continue
            threading.Thread(
                target=self._greet, args=(connection, str(address)), daemon=True, name="handshake"
            ).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            hello = let_in(connection, self._key)
            if hello.versions != versions():
                reason = (
                    f"the rank on {address} has {hello.versions}, and the trainer has {versions()}: install "
                    "the same on both"
                )
                with connection.makefile("wb") as file:
                    write_frame(file, Failed(reason))
                raise NotLetIn(reason)
            member = FarMember(connection, address, hello, self._died)
        except (OSError, ValueError, Explained) as error:
            self._log.warning("a connection from %s was not let in: %s", address, error)
            connection.close()
            return
        finally:
            self._handshakes.release()
        with self._changed:
            if not self._shut:
                self._come.append(member)
                self._log.info("%d of %d ranks of other machines are here", len(self._come), self.wanted)
                self._changed.notify_all()
                return
        member.drop()


def _resolved(host: str) -> str:
    """Return the IPv4 address of a name. Raise WrongAddress if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise WrongAddress(f"placement.ranks.address: {host} has no IPv4 address: {error}") from error
