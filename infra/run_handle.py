"""A run as a reader sees it: its record, store, bus and topics."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from infra.bus import Bus
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

    @property
    def spec(self) -> RunSpec:
        """The run's settings."""
        return self.record.spec

    @property
    def run(self) -> str:
        """The run's id."""
        return self.record.id


@contextmanager
def opened_run(store: Store, record: RunRecord, name: str) -> Iterator[RunHandle]:
    """Open a run for reading, and close its bus in the end. `name` is the reader's, for the broker's log."""
    bus = connect_with_archive(record, name, store)
    try:
        topics = Topics(record.id, record.spec.lengths.classes)
        yield RunHandle(record, store, bus, topics, logging.getLogger("streamrl"))
    finally:
        bus.close()
