"""Start, command and watch the other ranks, from rank 0: processes here, and connections from elsewhere.

A rank that ends unasked ends the trainer. If the trainer talks to that rank, it meets a closed pipe or
connection, and raises an error that says which rank it was and how it ended. If it waits for something else,
or hangs in a GPU collective, the watching thread ends it: not while ranks compute without each other, and the
one that ended said why. Rank 0 reads that when it has computed its own share, however long this takes.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from consumers.learners import collective
from consumers.learners.collective import Seat
from consumers.learners.optimizing import NotFinite
from consumers.ranks.far_member import FarMember
from consumers.ranks.local_member import LocalMember
from consumers.ranks.member import OtherRank, RankFailed, RanksApart
from consumers.ranks.rank_wire import Command, CommandDone, Setup
from consumers.ranks.trainer_door import TrainerDoor
from infra.errors import Explained
from infra.machine_kind import kind_of_machine
from infra.ranks.rank_addresses import RanksError, meeting_place
from infra.stack.ports import LOOPBACK
from schemas.runspec import RunSpec

_GRACE_S = 5.0  # for the trainer to notice by itself, and for ranks to end


class RankProcesses:
    """All ranks but rank 0. `door`: where those of other machines come in; None: all are on this machine."""

    def __init__(
        self, model: str, spec: RunSpec, *, run: str, log: logging.Logger, door: TrainerDoor | None = None
    ) -> None:
        self._deadlines, self._log, self._door = spec.deadlines, log, door
        self._ranks = spec.trainer.ranks
        self._host = LOOPBACK if door is None else door.host
        self._place = meeting_place(self._ranks, self._host)
        self._died, self._known = threading.Event(), threading.Event()
        self._apart_until = 0.0  # when ranks last computed without each other
        self._members: list[OtherRank] = []
        self._setup = lambda number, local: Setup(
            run, model, spec.model_dump_json(), number, self._ranks, local, self._host, self._place.port
        )

    def open(self) -> RankProcesses:
        """Start the processes of this machine. Return itself."""
        if self._door is not None:
            self._door.open(self._died)
        here = self._ranks - (0 if self._door is None else self._door.wanted)
        for number in range(1, here):
            self._members.append(LocalMember(number, self._died).open())
        with self.watched():
            for member in self._members:
                member.send(self._setup(member.number, member.number), self._deadlines.start_s)
        threading.Thread(target=self._watch, daemon=True, name="ranks").start()
        return self

    def join(self) -> None:
        """Join the process group as rank 0, when all others are there."""
        for member in self._members:  # a rank that can't start says so here, before anyone waits for it
            member.reply(self._deadlines.start_s)
        if self._door is not None:
            self._take_in(self._door.members(self._deadlines.start_s))
        seat = Seat(0, self._ranks, 0, self._host)
        collective.join_ranks(seat, self._place, self._deadlines)

    def _take_in(self, far: Sequence[FarMember]) -> None:
        first = len(self._members) + 1
        self._members += [member.open(first + place) for place, member in enumerate(far)]
        for member in far:
            self._log.info("rank %d is number %d on %s", member.number, member.local, member.address)
            member.send(self._setup(member.number, member.local), self._deadlines.start_s)
        for member in far:
            member.reply(self._deadlines.start_s)

    def send(self, rank: int, command: Command) -> None:
        """Send a command to one rank. The caller must take its reply."""
        self._members[rank - 1].send(command, self._deadlines.progress_s)

    def send_all(self, command: Command) -> None:
        """Send a command to all ranks."""
        for member in self._members:
            member.send(command, self._deadlines.progress_s)

    def replies(self) -> list[CommandDone]:
        """Return the reply of each rank to the last command, in order of rank."""
        return [member.reply(self._deadlines.progress_s) for member in self._members]

    def ready(self) -> None:
        """Return when each rank has its model. Warn of those on machines of another kind than this."""
        own, others = kind_of_machine(), dict[str, list[str]]()
        for member, reply in zip(self._members, self.replies(), strict=True):
            if reply.machine != own:
                others.setdefault(reply.machine, []).append(member.name)
        if others:
            self._log.warning(
                "bits may differ from those of machines of one kind: rank 0 computes on %s, and %s", own,
                ", and ".join(f"{', '.join(names)} on {kind}" for kind, names in others.items()),
            )  # fmt: skip

    def check_weights(self, digest: int, steps: int) -> None:
        """Take the replies to a step. Raise RanksApart if weights have another digest than rank 0's.

        `steps`: how many the optimizer has taken.
        """
        replies = zip(self._members, self.replies(), strict=True)
        if apart := [member.name for member, reply in replies if reply.weights != digest]:
            raise RanksApart(
                f"after optimizer step {steps} the weights of {', '.join(apart)} are no longer rank 0's: all "
                "ranks take rank 0's when the trainer starts again from its checkpoint. If it happens again, "
                "place all ranks on machines of one kind, and look for a fault of these machines"
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Replace errors in this context by one that tells of a rank's end, if that explains them."""
        try:
            yield
        except (RankFailed, NotFinite):  # other ranks may end of it too: that is not reported again
            self._known.set()
            raise
        except (RuntimeError, OSError, EOFError) as error:  # a collective, a pipe, the end of a pipe
            if isinstance(error, Explained) or not self._died.wait(_GRACE_S):
                raise
            self._known.set()
            raise self._obituary() from error

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Tell that no rank waits for another in this context, and that replies are taken in it."""
        self._apart_until = math.inf
        try:
            yield
        finally:
            self._apart_until = time.monotonic()

    def check(self) -> None:
        """Raise if a rank has ended. For any thread: the one that gives commands reads what the rank said."""
        if gone := [member for member in self._members if member.ended.is_set()]:
            first = min(gone, key=lambda member: member.ended_at)
            raise RanksError(f"{first.name} ended before it wrote its part of a checkpoint: it {first.how()}")

    def _obituary(self) -> RanksError:
        gone = [member for member in self._members if member.ended.is_set()]
        return min(
            gone, key=lambda member: member.ended_at
        ).obituary()  # the others lost the connection to it

    def _watch(self) -> None:
        """End the trainer, wherever it is, when a rank has ended unasked."""
        self._died.wait()
        while not self._known.wait(_GRACE_S):
            said = any(member.has_said() for member in self._members if member.ended.is_set())
            if not said or time.monotonic() > self._apart_until + _GRACE_S:
                break
        else:
            return
        self._log.error("%s", self._obituary())
        os._exit(1)  # the main thread can be in a collective that never ends

    def close(self) -> None:
        """End all ranks."""
        self._known.set()
        self._died.set()  # ends the watching thread
        if self._door is not None:
            self._door.close()
        for member in self._members:  # all at once: they leave the process group together
            member.hang_up()
        until = time.monotonic() + _GRACE_S
        for member in self._members:
            member.close(max(0.0, until - time.monotonic()))
