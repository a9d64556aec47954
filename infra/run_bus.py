"""The bus of a run, as its record says where it is."""

from __future__ import annotations

from infra.kafka_bus import KafkaBus
from infra.runs import RunRecord


def connect(record: RunRecord, name: str) -> KafkaBus:
    """The bus of a run."""
    kafka = record.spec.placement.kafka
    return KafkaBus(
        record.bootstrap_servers, name=name, replication=kafka.replication,
        retention_hours=kafka.retention_hours, delivery_s=record.spec.deadlines.progress_s,
    )  # fmt: skip
