"""Connects to the bus that a run's record names."""

from __future__ import annotations

from infra.archive.joined_bus import JoinedBus
from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord, find
from infra.stores.store import Store


def connect(record: RunRecord, name: str) -> KafkaBus:
    """Return the bus of a run. `name` is how this client is called on the broker."""
    kafka = record.spec.placement.kafka
    return KafkaBus(
        record.bootstrap_servers, name=name, replication=kafka.replication,
        retention_hours=kafka.retention_hours, delivery_s=record.spec.deadlines.progress_s,
    )  # fmt: skip


def connect_with_archive(record: RunRecord, name: str, store: Store) -> JoinedBus:
    """Return the bus of a run, on which records that retention has removed are read from the archive."""
    return JoinedBus(
        connect(record, name), store,
        lambda run: record.identity if run == record.id else find(store, run).identity,
    )  # fmt: skip
