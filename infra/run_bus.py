"""Connects to the bus that a run's record names."""

from __future__ import annotations

from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord


def connect(record: RunRecord, name: str) -> KafkaBus:
    """Return the bus of a run. `name` is how this client is called on the broker."""
    kafka = record.spec.placement.kafka
    return KafkaBus(
        record.bootstrap_servers, name=name, replication=kafka.replication,
        retention_hours=kafka.retention_hours, delivery_s=record.spec.deadlines.progress_s,
    )  # fmt: skip
