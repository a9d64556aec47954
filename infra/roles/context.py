"""The context that a role works with: its run, the bus, its log and its heartbeat."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass, field

from infra.bus import Record, Writer
from infra.roles.heart import Heart
from infra.run_handle import RunHandle
from infra.runs import host_name
from infra.sites.place import Site
from infra.waiting import NoSigns, Signs, Wait
from schemas.messages import DeadLetter
from schemas.wire import encode

_LONGEST_REASON = 4_000
_LARGEST_QUOTED = 256 << 10  # bytes of a record that are repeated in its dead letter


class Stopped(Exception):
    """The process was told to stop."""


@dataclass
class RoleContext(RunHandle):
    """The run, with the writer, heartbeat and end of a process that works on it."""

    role: str
    number: int
    writer: Writer
    heart: Heart
    stop: threading.Event
    site: Site | None = None  # None: the process is where the object store is
    signs: Signs = field(default_factory=NoSigns)  # of life anywhere in the run
    feeder_epoch: int = 0  # of a feeder: the number of this start

    @property
    def name(self) -> str:
        """The name of this process in messages for people."""
        return f"{self.role}-{self.number}@{host_name()}"

    def wait(self, what: str, *, unblocked_by: str) -> Wait:
        """Return a wait that ends when nothing has moved anywhere for `deadlines.progress_s`."""
        return Wait(
            what, unblocked_by=unblocked_by, deadline_s=self.spec.deadlines.progress_s, signs=self.signs
        )

    def dead_letter(self, record: Record, reason: str, *, wanted: str = "") -> None:
        """Report a record that can't be used as a dead letter; the run goes on.

        `wanted`: the sample that the record should have been, and that the dispatcher has to have made again.
        A record of more than 256 KiB is named by its position alone, so that the letter fits.
        """
        quoted = record.value if len(record.value) <= _LARGEST_QUOTED else b""
        letter = DeadLetter(
            run=self.run, topic=record.topic, partition=record.partition, offset=record.offset,
            reason=reason[:_LONGEST_REASON], raw=quoted,
            found_by=self.name, found_at=time.time(), wanted=wanted,
        )  # fmt: skip
        self.writer.send(
            self.topics.dead, encode(letter), key=f"{record.topic}/{record.partition}/{record.offset}"
        )
        self.heart.counters["dead_letters"] = self.heart.counters.get("dead_letters", 0) + 1
        self.log.warning("%s[%d]@%d goes to %s: %s", record.topic, record.partition, record.offset,
                         self.topics.dead.name, reason)  # fmt: skip

    def loaded(self) -> None:
        """Start garbage collection of new objects. Called once all that stays is in memory."""
        gc.freeze()
        gc.enable()

    def check_stop(self) -> None:
        """Raise Stopped if this process was told to stop."""
        if self.stop.is_set():
            raise Stopped
