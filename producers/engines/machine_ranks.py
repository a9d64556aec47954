"""The role `engine_ranks`: this machine's ranks of a generator's engine that leads from another machine.

runs/<run>/engine_ranks/<n>.json ──► connect, offer ranks ──► StartRanks ──► their processes ──► they ended
              ▲                                                                                    │
              └────────────────── an engine that starts again writes it anew ◄─────────────────────┘

`streamrl join RUN --engine-ranks N` starts one. This process holds neither model nor torch: it receives
patches of the weights for all ranks here, says how far they are, and ends them when rank 0 is gone.

waits for          unblocked by
a start of ranks   an engine that lacks some: a start of a generator
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from infra import choices
from infra.errors import Explained
from infra.gpus import visible_gpus
from infra.ranks import rendezvous
from infra.ranks.frames import read_frame, write_frame
from infra.ranks.handshake import NotLetIn
from infra.ranks.rendezvous import Rendezvous
from infra.ranks.serving_starts import Reached, TurnedAway, connect_to_rank_0, reach_rank_0, serve_starts
from infra.roles.context import RoleContext
from infra.roles.entry import run_role
from infra.stores.store import StoreError
from infra.supervise.children import kill
from producers.engines.engine import lasting_error
from producers.engines.engine_door import config_digest, engine_versions, gpu_kinds
from producers.engines.far_messages import (
    TO_MACHINE_BYTES,
    FromMachine,
    LinkHello,
    MachineHello,
    MachineRefused,
    Marked,
    NotTaken,
    PatchFollows,
    PatchTaken,
    RankEnded,
    StartRanks,
    ToMachine,
)
from producers.engines.other_engine_ranks import RankOptions, start_rank
from producers.engines.patch_transfer import largest_patch, receive_patch
from producers.engines.rank_marks import RankMarks
from producers.engines.received_patch import PatchRefused, ReceivedPatch
from producers.engines.server_facts import DIGEST_BYTES

ROLE = "engine_ranks"

_LOOK_S = 0.5
_GRACE_S = 15.0  # for rank 0 to end once a rank has ended

_decode = msgspec.msgpack.Decoder(ToMachine).decode


class ControlLink:
    """The connection to rank 0. A thread reads it, and takes patches."""

    def __init__(self, connection: socket.socket, largest: int, log: logging.Logger) -> None:
        """`largest`: bytes that a patch may have."""
        self._connection, self._largest, self._log = connection, largest, log
        self.address = str(connection.getsockname()[0])
        self.lost = threading.Event()
        self._in, self._out = connection.makefile("rb"), connection.makefile("wb")
        self._one_at_a_time = threading.Lock()
        self._starts: queue.SimpleQueue[StartRanks | NotTaken] = queue.SimpleQueue()
        self._patch = contextlib.ExitStack()  # holds the newest one

    def open(self) -> ControlLink:
        """Listen. Return itself."""
        threading.Thread(target=self._listen, daemon=True, name="rank-0").start()
        return self

    def start(self, wait_s: float) -> StartRanks | NotTaken | None:
        """Return what this machine shall start, or why it shall not; None if rank 0 has not said it yet."""
        try:
            return self._starts.get(timeout=wait_s)
        except queue.Empty:
            return None

    def say(self, message: FromMachine) -> None:
        """Tell rank 0 something. If it is gone, `lost` will say so."""
        try:
            with self._one_at_a_time:
                write_frame(self._out, message)
        except (OSError, ValueError):
            self.lost.set()

    def close(self) -> None:
        """Close the connection, and let a patch go."""
        with contextlib.suppress(OSError):  # the other side has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self) -> None:
        try:
            while (frame := read_frame(self._in, TO_MACHINE_BYTES)) is not None:
                self._take(_decode(frame))
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError, Explained) as error:
            self._log.info("the connection to the engine ended: %s", error)
        finally:
            self._patch.close()
            self.lost.set()

    def _take(self, said: ToMachine) -> None:
        if isinstance(said, StartRanks | NotTaken):
            self._starts.put(said)
        elif isinstance(said, PatchFollows):
            self._take_patch(said.size)
        else:
            self._patch.close()

    def _take_patch(self, size: int) -> None:
        """Receive a patch. One that can't be taken ends the connection: what follows it can't be read."""
        self._patch.close()
        try:
            received = self._patch.enter_context(ReceivedPatch(size + DIGEST_BYTES, self._largest))
            path = receive_patch(received, size, self._in)
        except (OSError, PatchRefused) as error:
            self.say(MachineRefused(f"could not take a patch of weights: {error}"))
            raise
        self.say(PatchTaken(path))


class MachineRanks:
    """The ranks of one start of an engine on this machine."""

    def __init__(self, context: RoleContext, at: Rendezvous, link: ControlLink) -> None:
        self._context, self._at, self._link = context, at, link
        self._marks = RankMarks()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> str:
        """Start the ranks that rank 0 asks for, and keep them until it is gone. Return how that ended."""
        link, heart = self._link, self._context.heart
        heart.waiting("an engine to start its ranks here", unblocked_by="generator", cause="generator")
        try:
            while (start := link.start(_LOOK_S)) is None:
                self._context.check_stop()
                if link.lost.is_set():
                    return "the engine needs no ranks of this machine"
            if isinstance(start, NotTaken):
                raise TurnedAway(f"the engine does not take this machine: {start.reason}")
            heart.working("computing as ranks of an engine")
            try:
                self._start(start)
            except (OSError, NotLetIn) as error:
                link.say(MachineRefused(f"it could not start its ranks: {error}"))
                raise
            return self._keep()
        finally:
            for process in self._processes.values():
                kill(process)
            link.close()

    def _start(self, asked: StartRanks) -> None:
        """Start the processes, from this thread, which lives as long as they shall."""
        self._context.log.info("ranks %s of the engine begin here", ", ".join(map(str, asked.numbers)))
        meeting = replace(asked.meeting, address=self._link.address)
        engine = replace(asked.engine, model=self._context.record.model, far=None)
        for local, number in enumerate(asked.numbers):
            links = [
                connect_to_rank_0(self._at, LinkHello(asked.token, number, beside))
                for beside in (False, True)
            ]
            said = RankOptions(
                engine=engine, number=number, local=local, meeting=meeting, group=asked.group,
                marks=str(self._marks.path), acts=links[0].fileno(), beside=links[1].fileno(),
            )  # fmt: skip
            self._processes[number] = start_rank(said, [])
            for one in links:
                one.close()  # the rank alone holds it: so rank 0 hears of its end

    def _keep(self) -> str:
        told: set[int] = set()
        until = float("inf")
        while not self._link.lost.wait(_LOOK_S):
            self._context.check_stop()
            self._link.say(Marked(self._marks.of(self._processes)))
            for number, process in self._processes.items():
                if process.poll() is not None and number not in told:
                    told.add(number)
                    self._link.say(RankEnded(number, f"ended with status {process.returncode}"))
                    until = min(until, time.monotonic() + _GRACE_S)
            if time.monotonic() > until:
                break  # rank 0 stands still; without its ranks it can't go on anyhow
        ended = ", ".join(
            f"{number} with status {self._processes[number].returncode}" for number in sorted(told)
        )
        return f"ranks of the engine ended: {ended}" if ended else "the engine on the other machine has ended"


def _reached(context: RoleContext, hello: MachineHello, generator: int | None) -> Reached | str:
    """Return a connection to an engine that lacks ranks, and where that is; or why there is none."""
    if generator is not None:
        return reach_rank_0(context, rendezvous.engine_meeting(generator), hello)
    try:
        names = rendezvous.engine_meetings(context.store, context.record)
    except StoreError as error:
        return str(error)
    why = "no engine has said where its ranks meet"
    for name in names:
        found = reach_rank_0(context, name, hello)
        if not isinstance(found, str):
            return found
        why = found
    return why


def body(ranks: int, generator: int | None, context: RoleContext) -> None:
    """Hold ranks of one start of an engine after the other."""
    if choices.cuda() and len(found := visible_gpus()) < ranks:
        raise lasting_error(
            f"--engine-ranks: {ranks} ranks of an engine need a GPU each, and this machine shows {len(found)}"
        )
    model = context.record.model
    hello = MachineHello(ranks, engine_versions(), config_digest(model), gpu_kinds())
    largest = largest_patch(model)
    context.loaded()
    serve_starts(
        context, leader="generator", work="computing as ranks of an engine",
        reached=lambda: _reached(context, hello, generator),
        serve=lambda connection, at: _served(context, at, ControlLink(connection, largest, context.log)),
    )  # fmt: skip


def _served(context: RoleContext, at: Rendezvous, link: ControlLink) -> str:
    try:
        return MachineRanks(context, at, link.open()).run()
    except (OSError, NotLetIn) as error:
        return f"the ranks could not be connected: {error}"


def main(argv: Sequence[str]) -> int:
    """Run the role. Return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks this machine holds")
    parser.add_argument("--generator", type=int, help="number of the generator, if not any that lacks ranks")
    given, rest = parser.parse_known_args(argv)
    return run_role(ROLE, partial(body, given.ranks, given.generator), rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
