"""The local broker: started, found again, killed, recovered, stopped."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition

from infra.bus import NoBroker
from infra.bus import read_all as read_all_of
from infra.kafka_bus import KafkaBus
from infra.stack import local
from infra.stack.kafka import KafkaService
from infra.stack.paths import StackPaths
from infra.stack.services import ServiceContext, ServicesFile, read_record
from schemas.topics import Topic
from tests.stacks import ending_with_us, listens_on, processes_of
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(new_home: Callable[[str], StackPaths]) -> Iterator[StackPaths]:
    """A broker that these tests may kill. Each test begins with `up`: none relies on another."""
    paths = new_home("own-kafka")
    with ending_with_us(paths):
        yield paths


def up(paths: StackPaths) -> ServicesFile:
    local.start_stack(prefect=False, paths=paths)
    record = read_record(paths, "kafka")
    assert record is not None
    return record


def make_topic(address: str, name: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=address)
    try:
        admin.create_topics({name: {"num_partitions": 1, "replication_factor": 1}}, wait_for_metadata=True)
    finally:
        admin.close()


def read_all(address: str, topic: str) -> list[bytes]:
    """The whole of partition 0, up to where it ended when this began."""
    partition = TopicPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=address, max_partition_fetch_bytes=16 << 20)
    values: list[bytes] = []
    try:
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        end = consumer.end_offsets([partition])[partition]

        def reached_the_end() -> bool:
            for records in consumer.poll(timeout_ms=200).values():
                values.extend(record.value for record in records)
            return consumer.position(partition) >= end

        wait_until(reached_the_end, what=f"the end of {topic}, offset {end}")
    finally:
        consumer.close()
    return values


def test_two_ups_at_once_start_one_broker_on_the_loopback_address(home: StackPaths) -> None:
    records: list[ServicesFile] = []
    threads = [threading.Thread(target=lambda: records.append(up(home))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({record.pid for record in records}) == 1
    assert len(processes_of(home.home)) == 1
    assert listens_on(records[0].pid) == {"127.0.0.1"}


def test_a_second_up_changes_nothing(home: StackPaths) -> None:
    first = up(home)
    assert up(home) == first
    kafka = next(service for service in local.stack_state(paths=home) if service.name == "kafka")
    assert (kafka.status, kafka.pid, kafka.url) == ("running", first.pid, first.url)


def test_takes_a_record_of_8_mib(home: StackPaths) -> None:
    address = up(home).url
    make_topic(address, "large")
    value = os.urandom(8 << 20)
    producer = KafkaProducer(bootstrap_servers=address, max_request_size=12 << 20)
    try:
        producer.send("large", value, partition=0).get(timeout=150)
    finally:
        producer.close()
    assert read_all(address, "large") == [value]


class Stream:
    """Numbers from 0 up, sent without a pause; `acknowledged` holds those that the broker confirmed."""

    def __init__(self, address: str, topic: str) -> None:
        self.acknowledged: list[int] = []
        self._stop = threading.Event()
        self._topic = topic
        self._producer = KafkaProducer(
            bootstrap_servers=address,
            acks="all",
            linger_ms=2,
            reconnect_backoff_max_ms=200,
            delivery_timeout_ms=120_000,
        )
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        number = 0
        while not self._stop.wait(0.001):
            value = f"{number}:".encode().ljust(2_000, b"x")
            self._producer.send(self._topic, value, partition=0).add_callback(
                lambda _, number=number: self.acknowledged.append(number)
            )
            number += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush(timeout=300)
        self._producer.close()


def test_kill_9_in_mid_stream_loses_no_acknowledged_record(home: StackPaths) -> None:
    before = up(home)
    make_topic(before.url, "killed")
    stream = Stream(before.url, "killed")
    try:
        wait_until(lambda: len(stream.acknowledged) > 500, what="500 acknowledged records")
        psutil.Process(before.pid).kill()
        wait_until(
            lambda: local.stack_state(paths=home)[0].status == "died", what="the broker's death to be noticed"
        )
        after = up(home)
        assert after.pid != before.pid
        assert after.url == before.url, "clients look for it where it was"
        so_far = len(stream.acknowledged)
        wait_until(
            lambda: len(stream.acknowledged) > so_far + 500, what="the stream to go on", deadline_s=90.0
        )
    finally:
        stream.close()
    numbers = [int(value.split(b":")[0]) for value in read_all(after.url, "killed")]
    assert numbers == sorted(set(numbers)), "none twice, all in order"
    assert set(stream.acknowledged) <= set(numbers)


def test_who_is_patient_outlasts_a_broker_that_stands_still(home: StackPaths) -> None:
    """It is fenced meanwhile, as its session lasts for 6 s, and names no broker for a moment afterwards."""
    record, topic = up(home), Topic("made-late", 2)
    broker = psutil.Process(record.pid)
    broker.suspend()
    again = threading.Timer(20, broker.resume)  # a client that is not patient gives up after 15 s
    again.start()
    try:
        bus = KafkaBus(record.url)
        bus.create_topics([topic])
        writer = bus.writer()
        writer.send(topic, b"it", key="k", partition=1)
        writer.flush(300)
        writer.close()
    finally:
        again.join()
    assert [found.value for found in read_all_of(bus, topic, deadline_s=300)] == [b"it"]


def test_who_is_told_to_stop_is_patient_no_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        stop = threading.Event()
        stop.set()
        begun = time.monotonic()
        with pytest.raises(NoBroker, match="does not answer"):
            KafkaBus(address, delivery_s=3_600, stop=stop).topic_names()
    assert time.monotonic() - begun < 600


def test_down_leaves_no_process_and_up_brings_the_records_back(home: StackPaths) -> None:
    address = up(home).url
    make_topic(address, "kept")
    producer = KafkaProducer(bootstrap_servers=address)
    producer.send("kept", b"still here", partition=0).get(timeout=150)
    producer.close()
    assert local.stop_stack(paths=home) == 1
    assert processes_of(home.home) == []
    assert not home.state_file("kafka").exists()
    assert local.stop_stack(paths=home) == 0
    assert read_all(up(home).url, "kept") == [b"still here"]


def start_up_elsewhere(paths: StackPaths) -> subprocess.Popen[bytes]:
    """`up` in a process of its own, returned while the broker is starting."""
    code = (
        "import sys, pathlib; from infra.stack import local; from infra.stack.paths import StackPaths;"
        "local.start_stack(prefect=False, paths=StackPaths.locate(pathlib.Path(sys.argv[1])))"
    )
    # Ctrl-C reaches it whatever this process does with that signal.
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.home)], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: read_record(paths, "kafka"), what="the broker to be on its way", deadline_s=60.0)
    return child


def test_ctrl_c_in_mid_up_leaves_nothing(new_home: Callable[[str], StackPaths]) -> None:
    paths = new_home("interrupted")
    child = start_up_elsewhere(paths)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=300) != 0
    assert processes_of(paths.home) == []
    assert local.stack_state(paths=paths)[0].status == "stopped"


def test_up_goes_on_where_a_killed_up_left_off(new_home: Callable[[str], StackPaths]) -> None:
    paths = new_home("abandoned")
    child = start_up_elsewhere(paths)
    try:
        child.kill()
        child.wait(timeout=150)
        started = read_record(paths, "kafka")
        assert started is not None
        assert up(paths).pid == started.pid
    finally:
        local.stop_stack(paths=paths)
    assert processes_of(paths.home) == []


def test_a_broker_of_tests_ends_if_they_are_killed(new_home: Callable[[str], StackPaths]) -> None:
    paths = new_home("killed")
    code = (
        "import sys, pathlib; from infra.stack.paths import StackPaths; from tests.stacks import own_broker\n"
        "with own_broker(StackPaths.locate(pathlib.Path(sys.argv[1]))): print(); sys.stdin.read()"
    )
    tests = subprocess.Popen(
        [sys.executable, "-uc", code, str(paths.home)], cwd=REPOSITORY,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with tests:
        try:
            assert tests.stdout is not None and tests.stdout.readline(), "it ended"
            assert len(processes_of(paths.home)) > 1
            tests.kill()
            wait_until(lambda: not processes_of(paths.home), what="the broker's end", deadline_s=30)
        finally:
            tests.kill()
            local.stop_stack(paths=paths)


def test_a_cluster_id_may_begin_with_a_dash(
    new_home: Callable[[str], StackPaths], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id in 64 does, and the tool that formats the log then saw another option."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=b"\xf8" * 16))
    context = ServiceContext(new_home("dashed"))
    KafkaService().prepare(context)
    KafkaService().launch(context, port=19092)
    assert "cluster.id=-Pj4" in (context.paths.kafka_data / "meta.properties").read_text()
