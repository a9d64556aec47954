"""Fetching by position brings what comes along in the same batches, and no more waits than it must."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from infra.kafka_bus import KafkaBus
from infra.kafka_fetcher import KafkaFetcher
from schemas.topics import Topic
from tests.retention import remove_before

COUNT = 20


@pytest.fixture
def bus(kafka: str) -> KafkaBus:
    return KafkaBus(kafka)


@pytest.fixture
def topic(bus: KafkaBus) -> Topic:
    """A topic with one batch of records in each of its partitions."""
    made = Topic(f"t-{uuid4().hex}", 2)
    bus.create_topics([made])
    writer = bus.writer()
    for number in range(2 * COUNT):
        writer.send(made, b"x" * 300, key=str(number), partition=number % 2)
    writer.flush(100)
    writer.close()
    return made


@pytest.fixture
def fetcher(bus: KafkaBus) -> Iterator[KafkaFetcher]:
    made = bus.fetcher()
    yield made
    made.close()


def test_records_before_the_wanted_one_come_too(fetcher: KafkaFetcher, topic: Topic) -> None:
    found = fetcher.fetch(topic, {0: [COUNT - 1]}, deadline_s=100)
    assert len(found) > 1, "the broker sent the whole batch"
    found = fetcher.fetch(topic, {1: [COUNT - 1]}, deadline_s=100)  # now it knows how small records are
    assert found.keys() == {(1, offset) for offset in range(COUNT)}


def test_a_record_is_found_though_those_before_it_are_removed(
    fetcher: KafkaFetcher, topic: Topic, kafka: str
) -> None:
    remove_before(kafka, topic, {0: 5})
    found = fetcher.fetch(topic, {0: [4, 5], 1: [3]}, deadline_s=100)
    assert {(0, 5), (1, 3)} <= found.keys() and (0, 4) not in found
