"""A run as a reader sees it: its record, store, bus and topics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from infra.archive.archive_alone import archive_bus, with_advice
from infra.bus import Bus, NoBroker
from infra.run_bus import connect_with_archive
from infra.runs import RunRecord
from infra.stores.store import Store
from schemas.runspec import RunSpec
from schemas.topics import Topics


@dataclass
class RunHandle:
    """Everything that reading a run takes. A role's `RoleContext` is one of these, and can write."""

    record: RunRecord
    store: Store
    bus: Bus
    topics: Topics
    log: logging.Logger
    archive_alone: bool = field(default=False, kw_only=True)  # whether the bus is the archive, without a log
    store_option: str = field(
        default="", kw_only=True
    )  # by which a command finds the store, such as --store URL

    @property
    def kept_in(self) -> str:
        """Where records are read from, for people."""
        return "archive" if self.archive_alone else "log"

    @property
    def ledger_words(self) -> str:
        """The ledger, for people."""
        return f"the {'archived ' if self.archive_alone else ''}ledger of run {self.run}"

    @property
    def more_words(self) -> str:
        """How to have more records, for people; empty if all there are can be read."""
        if not self.archive_alone:
            return ""
        return f". Where its broker is, `{self.command('archive')}` adds what came since to the archive"

    def command(self, name: str) -> str:
        """Return a command about this run, for people."""
        return f"streamrl {name} {self.run} {self.store_option}".rstrip()

    def ledger_before(self, step: int) -> int:
        """Return a position in the ledger that is not behind a step: each one before it has a record.

        The ledger of a fork begins with the fork's first step.
        """
        return max(0, step - (self.record.fork.step if self.record.fork else 0))

    @property
    def spec(self) -> RunSpec:
        """The run's settings."""
        return self.record.spec

    @property
    def run(self) -> str:
        """The run's id."""
        return self.record.id


@contextmanager
def opened_run(
    store: Store, record: RunRecord, name: str, *, archive_alone: bool = False, store_option: str = ""
) -> Iterator[RunHandle]:
    """Open a run for reading, and close its bus in the end. `name` is the reader's, for the broker's log.

    `archive_alone`: no broker is asked. Raises ArchiveError if the run has no archive. `store_option`: that
    of commands which are suggested.
    """
    bus: Bus | None = None
    try:
        bus = (
            archive_bus(record, store, store_option)
            if archive_alone
            else connect_with_archive(record, name, store)
        )
        topics = Topics(record.id, record.spec.lengths.classes)
        log = logging.getLogger("streamrl")
        yield RunHandle(
            record, store, bus, topics, log, archive_alone=archive_alone, store_option=store_option
        )
    except NoBroker as error:
        raise with_advice(error, record, store) from error
    finally:
        if bus is not None:
            bus.close()
