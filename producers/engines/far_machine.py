"""Rank 0's end of the connection to another machine that holds ranks of the engine."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from infra.errors import Explained
from infra.ranks.frames import kernel_time, read_frame, write_frame
from infra.ranks.waiting_room import is_closed
from producers.engines.engine import EngineError
from producers.engines.far_messages import (
    FROM_MACHINE_BYTES,
    DropPatch,
    FromMachine,
    MachineHello,
    MachineRefused,
    Marked,
    NotTaken,
    PatchTaken,
    RankEnded,
    StartRanks,
    ToMachine,
)
from producers.engines.patch_transfer import send_patch
from producers.engines.rank_marks import RankMarks

_decode = msgspec.msgpack.Decoder(FromMachine).decode


class FarMachine:
    """A machine that was let in. `address`: at which it is."""

    def __init__(self, connection: socket.socket, address: str, hello: MachineHello) -> None:
        self.address, self.ranks = address, hello.ranks
        self.received = 0  # bytes of patches that it has got
        self._connection = connection
        self._file, self._out = connection.makefile("rb"), connection.makefile("wb")
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._ended: dict[int, str] = {}  # how ranks ended
        self._lost = ""  # why it is lost; empty: it is not
        self._refused = ""  # why it could not go on, by itself
        self._patches: queue.SimpleQueue[PatchTaken | MachineRefused | None] = queue.SimpleQueue()
        self._brings = False  # whether a reply to a patch is due

    @property
    def is_gone(self) -> bool:
        """Whether a machine that was not yet given ranks has closed its connection."""
        return is_closed(self._connection)

    def turn_away(self, reason: str) -> None:
        """Say why it can't hold ranks, and close the connection."""
        with contextlib.suppress(OSError):
            self._say(NotTaken(reason))
        self.drop()

    def start(self, ranks: StartRanks, marks: RankMarks, deadline_s: float) -> None:
        """Have it start ranks, and listen to it. Sending waits no longer than the deadline from now on."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, kernel_time(deadline_s + 1))
        self._deadline, self._marks, self._numbers = deadline_s, marks, frozenset(ranks.numbers)
        try:
            self._say(ranks)
        except OSError as error:
            raise self._failed(f"could not be told to start them: {error}") from error
        threading.Thread(target=self._listen, daemon=True, name=f"machine-{self.address}").start()

    def bring(self, file: Path) -> Path:
        """Bring a patch there. Return its path there. Called beside steps."""
        self._brings = True
        try:
            with self._sending:
                self.received += send_patch(
                    file, lambda head: write_frame(self._out, head), self._connection.sendall
                )
        except OSError as error:
            raise self._failed(f"could not be sent a patch of weights: {error}") from error
        try:
            reply = self._patches.get(timeout=self._deadline)
        except queue.Empty:
            raise self._failed(f"took more than {self._deadline:.0f} s to take a patch of weights") from None
        if isinstance(reply, PatchTaken):
            return Path(reply.file)
        raise self._failed(reply.reason if reply else f"is lost: {self._lost}")

    def drop_patch(self) -> None:
        """Tell it that its ranks have read the patch."""
        with contextlib.suppress(OSError):  # whoever waits for it meets the error
            self._say(DropPatch())

    @property
    def lost(self) -> str:
        """Why a machine that was given ranks is lost; empty: it is not."""
        return self._lost

    def how_it_ended(self, rank: int, patience_s: float) -> str:
        """Return in words how a rank ended whose connection is closed. Waits a moment to hear of it."""
        until = time.monotonic() + patience_s
        with self._changed:
            while rank not in self._ended and not self._lost and time.monotonic() < until:
                self._changed.wait(0.1)
            if rank in self._ended:
                return f"{self._ended[rank]}; the log of `streamrl join` there has its last words"
            return f"is lost with its machine: {self._lost}" if self._lost else "closed its connection"

    def drop(self) -> None:
        """Close the connection: the machine ends its ranks."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _say(self, message: ToMachine) -> None:
        with self._sending:
            write_frame(self._out, message)

    def _failed(self, why: str) -> EngineError:
        return EngineError(f"the machine {self.address}, which holds ranks of the engine, {why}")

    def _listen(self) -> None:
        why = "it closed the connection"
        try:
            while (frame := read_frame(self._file, FROM_MACHINE_BYTES)) is not None:
                self._take(_decode(frame))
        except (OSError, ValueError, OverflowError, msgspec.MsgspecError, RecursionError, Explained) as error:
            why = str(error)
        with self._changed:
            self._lost = self._refused or why
            self._changed.notify_all()
        self._patches.put(None)

    def _take(self, said: FromMachine) -> None:
        if isinstance(said, Marked):
            self._marks.set(one for one in said.marks if one[0] in self._numbers)
        elif isinstance(said, RankEnded):
            with self._changed:
                if said.rank in self._numbers:
                    self._ended[said.rank] = said.how
                self._changed.notify_all()
        else:
            if isinstance(said, MachineRefused):
                self._refused = said.reason
            if self._brings:
                self._brings = False
                self._patches.put(said)


def room_for(wanted: int, machines: Sequence[FarMachine]) -> list[FarMachine]:
    """Return machines that hold so many ranks together, the largest first; none while they can't."""
    found: list[FarMachine] = []
    for one in sorted(machines, key=lambda machine: (-machine.ranks, machine.address)):
        if sum(machine.ranks for machine in found) < wanted:
            found.append(one)
    return found if sum(machine.ranks for machine in found) >= wanted else []
