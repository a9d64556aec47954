"""Removes records from Kafka, as retention does."""

from __future__ import annotations

from collections.abc import Mapping

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from schemas.topics import Topic


def remove_before(kafka: str, topic: Topic, ends: Mapping[int, int]) -> None:
    """Remove all records before these positions of the partitions."""
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    try:
        admin.delete_records({TopicPartition(topic.name, part): end for part, end in ends.items()})
    finally:
        admin.close()
