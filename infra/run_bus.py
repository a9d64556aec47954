"""Connects to the bus that a run's record names."""

from __future__ import annotations

import threading

from infra.archive.joined_bus import JoinedBus
from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord, find
from infra.stores.store import Store


def connect(
    record: RunRecord, name: str, *, patient: bool = False, stop: threading.Event | None = None
) -> KafkaBus:
    """Return the bus of a run. `name` is how this client is called on the broker.

    `patient`: for processes of a run, which outlive a restart of the broker; `stop` ends that patience. A
    user should hear at once.
    """
    kafka = record.spec.placement.kafka
    return KafkaBus(
        record.bootstrap_servers, name=name, replication=kafka.replication,
        retention_hours=kafka.retention_hours, delivery_s=record.spec.deadlines.progress_s,
        patient=patient, stop=stop,
    )  # fmt: skip


def connect_with_archive(
    record: RunRecord, name: str, store: Store, *, patient: bool = False, stop: threading.Event | None = None
) -> JoinedBus:
    """Return the bus of a run, on which records that retention has removed are read from the archive.

    Raises NoBroker for whoever is not patient if nobody listens.
    """
    log = connect(record, name, patient=True, stop=stop) if patient else connect(record, name)
    if not patient and isinstance(log, KafkaBus):
        log.check_listening()
    return JoinedBus(
        log, store,
        lambda run: record.identity if run == record.id else find(store, run).identity,
    )  # fmt: skip
