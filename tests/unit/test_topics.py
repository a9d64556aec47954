"""How topics are kept, and what the buses take."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import KafkaError

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


@pytest.mark.parametrize("answer", ["OK", "not allowed"])
def test_topics_that_are_there_keep_records_longer_if_the_run_file_says_so(
    answer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topics = Topics("r-1", 2)
    settings = {one.name: retention(one) for one in topics.all()}

    class Admin:
        def __init__(self, **options: object) -> None: ...
        def close(self) -> None: ...

        def list_topics(self) -> list[str]:
            return list(settings)

        def wait_for_topics(self, names: list[str], *, timeout_ms: int) -> None:
            assert timeout_ms == 60_000

        def describe_topics(self, names: list[str]) -> list[Any]:
            return []

        def describe_configs(self, asked: list[Any], *, config_filter: str) -> dict[str, Any]:
            found = {
                one.name: {key: {"value": value} for key, value in settings[one.name].items()}
                for one in asked
            }
            return {"topic": found}

        def alter_configs(self, asked: list[Any], *, raise_on_unknown: bool) -> dict[str, Any]:
            for one in asked if answer == "OK" else []:
                settings[one.name] |= one.configs
            return {"topic": {one.name: answer for one in asked}}

    monkeypatch.setattr("infra.kafka_bus.trouble", lambda servers, options: None)
    monkeypatch.setattr("infra.kafka_bus.KafkaAdminClient", Admin)
    for hours in (48, 24):  # none is shortened
        KafkaBus("nowhere:1", retention_hours=hours).create_topics(topics.all())
        assert not caplog.messages, "nothing is to be changed"
    before = {name: dict(some) for name, some in settings.items()}
    KafkaBus("nowhere:1", retention_hours=500).create_topics(topics.all())
    changed = {name for name, some in settings.items() if some != before[name]}
    fluid = {topics.prompts.name, topics.samples.name, topics.dead.name}
    assert changed >= fluid if answer == "OK" else not changed
    assert {settings[name]["retention.ms"] for name in changed} <= {str(500 * HOUR_MS)}
    assert topics.ledger.name not in changed and topics.assignments.name not in changed
    (said,) = caplog.messages
    assert ("are now kept for 500 hours" in said) == (answer == "OK")
    assert said.endswith("retention_hours)" if answer == "OK" else ": not allowed")
    caplog.clear()
    monkeypatch.setattr(Admin, "describe_configs", Mock(side_effect=KafkaError("denied")))
    KafkaBus("nowhere:1", retention_hours=900).create_topics(topics.all())
    assert "may not be kept for 900 hours" in caplog.text and "denied" in caplog.text


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
