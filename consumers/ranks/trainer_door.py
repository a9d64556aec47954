"""The trainer's door for ranks of other machines: as many as the run file places elsewhere."""

from __future__ import annotations

import logging
import socket
import threading

import msgspec

from consumers.ranks.far_member import FarMember
from consumers.ranks.rank_hello import Hello, needed_versions, rank_misfit
from consumers.ranks.rank_wire import Failed
from infra.ranks import rendezvous
from infra.ranks.doorway import Doorway
from infra.ranks.frames import write_frame
from infra.ranks.handshake import NotLetIn
from infra.ranks.rank_addresses import own_address
from infra.ranks.waiting_room import WaitingRoom
from infra.roles.context import RoleContext
from infra.runs import RunRecord
from infra.stores.store import Store
from infra.waiting import Wait


class TrainerDoor:
    """Listens on one address until so many ranks have come as the run file places elsewhere."""

    def __init__(
        self, store: Store, record: RunRecord, log: logging.Logger, role: RoleContext | None = None
    ) -> None:
        """`role`: says meanwhile that it waits for ranks, and may be told to stop."""
        self._role = role
        ranks = record.spec.placement.ranks
        self.wanted, self._store, self._record, self._log = ranks.elsewhere, store, record, log
        self.host = own_address(ranks.address, "placement.ranks.address")
        self._room: WaitingRoom[FarMember] = WaitingRoom()
        self._door = Doorway(self.host, msgspec.msgpack.Decoder(Hello), self._take_in, log)

    def open(self, died: threading.Event) -> TrainerDoor:
        """Listen, and write down where. `died`: set when a rank ends. Return itself."""
        self._died = died
        self._needed = needed_versions(self._record.spec)
        self._door.open(lambda port: rendezvous.announce(self._store, self._record, self.host, port))
        return self

    def members(self, deadline_s: float) -> list[FarMember]:
        """Return the ranks when all have come, those of one machine in a row. Nobody is let in after that."""
        run = self._record.id
        # each start has another port: a trainer that ends twice with the same words is not started again
        wait = Wait(
            f"{self.wanted} ranks of other machines at {self.host}:{self._door.announced.port}",
            unblocked_by=f"`streamrl join {run} --store {self._record.store} --ranks {self.wanted}` there",
            deadline_s=deadline_s,
        )  # fmt: skip
        self._log.info("waiting for %s (%s)", wait.what, wait.unblocked_by)
        if self._role is not None:
            self._role.heart.waiting("ranks of other machines", unblocked_by=wait.unblocked_by)
        try:  # a spare one tries again, and takes the place of one that ends
            found = self._room.chosen(self._choose, wait, self._is_over)
        finally:
            self.close()
        if self._role is not None:
            self._role.heart.working("starting")  # the model is loaded now
        return found

    def close(self) -> None:
        """Stop listening, and send those away who wait."""
        self._room.close()
        self._door.close()

    def _is_over(self) -> bool:
        """Whether a rank has ended that is here already."""
        if self._role is not None:
            self._role.check_stop()
        return self._died.is_set()

    def _choose(self, here: list[FarMember]) -> list[FarMember]:
        in_order = sorted(here, key=lambda one: (one.address, one.local))
        return in_order[: self.wanted] if len(in_order) >= self.wanted else []

    def _take_in(self, connection: socket.socket, address: str, hello: Hello) -> None:
        if reason := rank_misfit(address, hello.versions, self._needed):
            with connection.makefile("wb") as file:
                write_frame(file, Failed(reason))
            self._room.turned_away(reason)
            raise NotLetIn(reason)
        if here := self._room.enter(FarMember(connection, address, hello, self._died)):
            self._log.info("%d ranks of other machines are here, %d are needed", here, self.wanted)
