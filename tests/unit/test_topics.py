"""How topics are kept, and what the buses take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bus import LARGEST_RECORD, BusError
from infra.kafka_bus import KafkaBus
from infra.memory_bus import MemoryBus
from schemas.identity import is_sample_id, sample_id, sample_key
from schemas.topics import Topic, Topics

HOUR_MS = 3_600_000


def retention(topic: Topic) -> dict[str, str]:
    settings: dict[str, str] = KafkaBus("nowhere:1", retention_hours=48)._settings(topic)["configs"]
    return settings


def test_what_nobody_reads_again_is_kept_for_an_hour_and_the_ledger_for_ever() -> None:
    topics = Topics("r-1", 3)
    for topic in (topics.generators, topics.assignments, topics.parts):
        settings = retention(topic)
        assert settings["retention.ms"] == str(HOUR_MS)
        assert int(settings["segment.ms"]) < HOUR_MS, "a segment that grows is never let go of"
    assert retention(topics.ledger)["retention.ms"] == "-1"
    for topic in (topics.prompts, topics.samples, topics.dead):
        assert retention(topic)["retention.ms"] == str(48 * HOUR_MS)
        assert "segment.ms" not in retention(topic)
    assert retention(topics.weights)["cleanup.policy"] == "compact"


def test_the_bus_in_memory_takes_no_larger_records_than_kafka() -> None:
    bus, topic = MemoryBus(), Topic("t", 1)
    bus.create_topics([topic])
    writer = bus.writer()
    assert writer.send(topic, b"x" * (LARGEST_RECORD - 100), key="k").offset() == 0
    with pytest.raises(BusError, match=r"t can't be written: a record of 8388608 bytes is larger"):
        writer.send(topic, b"x" * LARGEST_RECORD, key="k")


@given(st.integers(-(2**40), 1025 * 2**40), st.integers(0, 2**15))
def test_ids_are_ids(group: int, index: int) -> None:
    name = sample_id(group, index)
    assert is_sample_id(name) and sample_key(name) == (group, index)


@given(st.text(max_size=30))
def test_what_is_taken_for_an_id_is_understood(name: str) -> None:
    if is_sample_id(name):
        group, index = sample_key(name)
        assert -(2**62) < group < 2**62 and 0 <= index < 10**5
