"""The bus contract, against Apache Kafka and against the fake that unit tests use."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from infra.bus import Bus, BusError, read_all
from infra.kafka_bus import KafkaBus
from infra.kafka_security import security_from_environment
from infra.memory_bus import MemoryBus
from infra.ownership import NotOurTopics, check_owner, claim
from infra.runs import RunRecord
from infra.waiting import WaitedTooLong
from schemas.topics import Topic, Topics
from tests.waiting import wait_until


@pytest.fixture(params=["kafka", "memory"])
def bus(request: pytest.FixtureRequest) -> Iterator[Bus]:
    made: Bus = KafkaBus(request.getfixturevalue("kafka")) if request.param == "kafka" else MemoryBus()
    yield made
    made.close()


@pytest.fixture
def topic(bus: Bus) -> Topic:
    made = Topic(f"t-{uuid4().hex}", 3)
    bus.create_topics([made])
    return made


def fill(bus: Bus, topic: Topic, count: int) -> None:
    writer = bus.writer()
    for number in range(count):
        writer.send(topic, f"{number}".encode() * 100, key=str(number), partition=number % topic.partitions)
    writer.flush(100)
    writer.close()


def test_brokers_are_counted(kafka: str) -> None:
    assert KafkaBus(kafka).broker_count() == 1


def test_records_come_back_by_partition_in_order(bus: Bus, topic: Topic) -> None:
    fill(bus, topic, 900)
    records = read_all(bus, topic, deadline_s=100)
    assert len(records) == 900
    for partition in range(3):
        mine = [record for record in records if record.partition == partition]
        assert [record.offset for record in mine] == list(range(300))
        assert [record.key for record in mine] == [
            str(number).encode() for number in range(partition, 900, 3)
        ]


def test_reading_goes_on_from_any_position(bus: Bus, topic: Topic) -> None:
    fill(bus, topic, 30)
    records = read_all(bus, topic, {0: 7, 1: 10}, deadline_s=100)
    assert sorted((r.partition, r.offset) for r in records) == [
        *((0, offset) for offset in (7, 8, 9)), *((2, offset) for offset in range(10)),
    ]  # fmt: skip


def test_a_reader_follows_and_knows_its_positions(bus: Bus, topic: Topic) -> None:
    reader = bus.reader(topic)
    assert reader.poll(0.0) == []
    fill(bus, topic, 6)
    seen: list[int] = []

    def all_came() -> bool:
        seen.extend(record.offset for record in reader.poll(0.1))
        return len(seen) == 6

    wait_until(all_came, what="six records")
    assert reader.positions() == reader.end_offsets() == {0: 2, 1: 2, 2: 2}
    reader.close()


def test_creating_again_is_fine_with_fewer_partitions_not_with_more(bus: Bus, topic: Topic) -> None:
    bus.create_topics([topic])
    if isinstance(bus, KafkaBus):
        with pytest.raises(BusError, match="has 3 partitions; the run needs 5"):
            bus.create_topics([Topic(topic.name, 5)])


def test_a_position_that_is_gone_is_an_error(kafka: str) -> None:
    bus, topic = KafkaBus(kafka), Topic(f"t-{uuid4().hex}", 1)
    bus.create_topics([topic])
    fill(bus, topic, 3)
    reader = bus.reader(topic, {0: 1000})
    with pytest.raises(BusError, match=topic.name):
        wait_until(lambda: reader.poll(0.1), what="the error")
    reader.close()


def test_large_records_pass(kafka: str) -> None:
    bus, topic = KafkaBus(kafka), Topic(f"t-{uuid4().hex}", 1)
    bus.create_topics([topic])
    writer = bus.writer()
    writer.send(topic, b"x" * (7 << 20), key="large")
    writer.flush(150)
    writer.close()
    assert len(read_all(bus, topic, deadline_s=100)[0].value) == 7 << 20


def test_compacted_topics_are_made_compacted(kafka: str) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    topics = Topics(f"r{uuid4().hex}", 2)
    KafkaBus(kafka).create_topics(topics.all())
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    try:
        described = str(
            admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topics.weights.name)])
        )
    finally:
        admin.close()
    assert "compact" in described


def test_topics_that_are_there_keep_records_longer_if_the_run_file_says_so(kafka: str) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    topic = Topic(f"t-{uuid4().hex}", 1)
    for hours in (48, 500, 24):  # none is shortened
        KafkaBus(kafka, retention_hours=hours).create_topics([topic])
    admin = KafkaAdminClient(bootstrap_servers=kafka)
    try:
        found = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic.name)])
    finally:
        admin.close()
    kept = {name: one["value"] for name, one in found["topic"][topic.name].items()}
    assert kept["retention.ms"] == str(500 * 3_600_000)
    assert "max.message.bytes" in kept, "other settings stay"


def test_no_broker_is_said_with_what_to_do() -> None:
    with pytest.raises(BusError, match=r"127\.0\.0\.1:1 can't be reached.*streamrl up"):
        KafkaBus("127.0.0.1:1", patient=False).create_topics([Topic("t", 1)])


def test_a_wait_in_vain_names_topic_and_broker() -> None:
    class Stuck(MemoryBus):
        def log(self, topic: Topic) -> list[list[object]]:  # type: ignore[override]
            return [[]]

    bus = Stuck()
    reader = bus.reader(Topic("quiet", 1))
    reader.end_offsets = lambda: {0: 5}  # type: ignore[method-assign]
    bus.reader = lambda topic, start=None: reader  # type: ignore[method-assign]
    with pytest.raises(
        WaitedTooLong, match=r"records of quiet without progress; the Kafka broker would unblock it"
    ):
        read_all(bus, Topic("quiet", 1), deadline_s=0.3)


def test_credentials_come_from_the_environment() -> None:
    found = security_from_environment(
        {"STREAMRL_KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "STREAMRL_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
         "STREAMRL_KAFKA_USERNAME": "u", "STREAMRL_KAFKA_PASSWORD": "p", "STREAMRL_KAFKA_CAFILE": "/ca.pem"}
    )  # fmt: skip
    assert found == {
        "security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "u",
        "sasl_plain_password": "p", "ssl_cafile": "/ca.pem",
    }  # fmt: skip


def test_topics_are_removed_with_their_records(bus: Bus, topic: Topic) -> None:
    fill(bus, topic, 3)
    bus.delete_topics([topic.name, "no-such-topic"])
    wait_until(lambda: topic.name not in bus.topic_names(), what="the topic to be gone")
    bus.delete_topics([topic.name])


def test_topics_have_one_owner(bus: Bus) -> None:
    topics, run = Topics(f"r{uuid4().hex[:8]}-1", 1), RunRecord.model_construct
    bus.create_topics([topics.owner])
    name = topics.owner.name.rpartition(".")[0]
    mine, theirs = (
        run(id=name, identity=uuid4().hex, store=f"file:///{which}", bootstrap_servers="k")
        for which in ("mine", "theirs")
    )
    check_owner(bus, theirs, topics)
    claim(bus, mine, topics)
    claim(bus, mine, topics)
    with pytest.raises(NotOurTopics, match="in the store file:///mine; this one is in file:///theirs"):
        claim(bus, theirs, topics)


def test_a_writer_says_where_records_stand(bus: Bus, topic: Topic) -> None:
    writer = bus.writer(batch=4096)
    sent = [writer.send(topic, b"x" * 500, key=str(n), partition=n % 3) for n in range(300)]
    writer.flush(100)
    assert [one.offset() for one in sent] == [n // 3 for n in range(300)]
    writer.close()


def test_single_records_are_fetched_by_position(bus: Bus, topic: Topic) -> None:
    fill(bus, topic, 3000)
    fetcher = bus.fetcher()
    wanted = {0: [7, 3, 999], 1: range(500, 520), 2: [0]}
    places = {(partition, offset) for partition, offsets in wanted.items() for offset in offsets}
    for _ in range(2):  # and again, of the same fetcher
        found = fetcher.fetch(topic, wanted, deadline_s=100)
        assert places <= set(found)
        for (partition, offset), record in found.items():
            assert (record.partition, record.offset) == (partition, offset)
            assert record.value == f"{3 * offset + partition}".encode() * 100
    assert len(found) < 3000, "far records are sought, not read over"
    fetcher.close()


def test_what_is_not_there_is_not_among_what_is_fetched(bus: Bus, topic: Topic) -> None:
    fill(bus, topic, 30)
    fetcher = bus.fetcher()
    wanted = {0: [10, 11, 10**15, -1, 5], 1: [10], 7: [0], -1: [0]}
    found = fetcher.fetch(topic, wanted, deadline_s=100)
    assert (0, 5) in found and not {place for place in found if place[1] >= 10}
    assert fetcher.fetch(topic, {}, deadline_s=100) == {}
    assert (2, 4) in fetcher.fetch(topic, {2: [4]}, deadline_s=100)
    fetcher.close()
