"""The bus on Apache Kafka, through kafka-python.

Credentials come from the environment, never from the run file: see `infra.kafka_security`. When a broker
can't be used, `infra.kafka_probe` finds out why, so that the error can say so.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.errors import KafkaError, TopicAlreadyExistsError, UnknownTopicOrPartitionError

from infra.bus import LARGEST_RECORD, SMALL_BATCH, BusError, NoBroker, Record
from infra.kafka_fetcher import KafkaFetcher
from infra.kafka_probe import Trouble, trouble
from infra.kafka_security import checked_settings, security_from_environment
from infra.kafka_words import said_by_kafka
from schemas.shortening import printable
from schemas.topics import FOR_EVER, Topic

_log = logging.getLogger(__name__)
_KEPT_MS = "retention.ms"  # Kafka's setting of a topic
_HOUR_MS = 3_600_000
_BATCH = 1 << 20  # the default of 16 KB makes every 20 KB record a batch of its own: 6-20x slower
# How long the broker holds a fetch while there are no records; with records it answers at once. Any other
# request on the connection waits for that answer.
_WAIT_MS, _PATIENT_MS = 400, 8_000
_REFUSED_S = 2.0  # for whoever is not patient: so long it may be that nobody listens
_TOPICS_READY_MS = 60_000
_UNMETERED = {"metrics_enabled": False}  # nobody reads metrics, and counting requests costs time


class KafkaBus:
    """The bus of one Kafka cluster."""

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        name: str = "streamrl",
        replication: int = 1,
        retention_hours: int = 24 * 14,
        delivery_s: float = 300.0,
        patient: bool = True,
        stop: threading.Event | None = None,
    ) -> None:
        """`patient`: try to reach a broker for `delivery_s`, even if nobody listens: it may be starting.

        Once `stop` is set, the try that is under way is the last one.
        """
        self.bootstrap_servers = bootstrap_servers
        self._replication, self._retention_hours = replication, retention_hours
        self._delivery_s = delivery_s
        self._security = checked_settings(security_from_environment())
        self._probed, self._patient, self._stop = False, patient, stop or threading.Event()
        self._common: dict[str, Any] = {
            "bootstrap_servers": bootstrap_servers.split(","),
            "client_id": name,
            "reconnect_backoff_max_ms": 2_000,
            "bootstrap_timeout_ms": 15_000,
            **self._security,
        }

    def create_topics(self, topics: Sequence[Topic]) -> None:
        admin = self._connect(KafkaAdminClient)
        try:
            existing = set(admin.list_topics())
            missing = {topic.name: self._settings(topic) for topic in topics if topic.name not in existing}
            with contextlib.suppress(TopicAlreadyExistsError):  # another process made it in between
                if missing:
                    admin.create_topics(missing)
            names = [topic.name for topic in topics]
            admin.wait_for_topics(names, timeout_ms=_TOPICS_READY_MS)
            self._keep_longer(admin, [topic for topic in topics if topic.name in existing])
            known = {found["name"]: len(found["partitions"]) for found in admin.describe_topics(names)}
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self.bootstrap_servers}: topics can't be created: {said_by_kafka(error)}"
            ) from error
        finally:
            admin.close()
        for topic in topics:
            if known.get(topic.name, topic.partitions) < topic.partitions:
                raise BusError(
                    f"topic {topic.name} has {known[topic.name]} partitions; the run needs "
                    f"{topic.partitions} (lengths.classes): delete the topic or use another run name"
                )

    def _keep_longer(self, admin: Any, topics: Sequence[Topic]) -> None:
        """Have topics of an earlier start keep records as long as the run file says now.

        None is shortened: that would remove records. A broker that refuses is no reason not to go on.
        """
        names = [one.name for one in topics if one.retention_hours is None and not one.compacted]
        asked = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
        now = self._retention_hours * _HOUR_MS
        try:
            found = admin.describe_configs(asked, config_filter="all")["topic"] if asked else {}
            kept = {
                name: int(settings.get(_KEPT_MS, {}).get("value", -1)) for name, settings in found.items()
            }
            shorter = [name for name, ms in kept.items() if 0 <= ms < now]
            longer = [ConfigResource(ConfigResourceType.TOPIC, one, {_KEPT_MS: str(now)}) for one in shorter]
            said = admin.alter_configs(longer, raise_on_unknown=False)["topic"] if longer else {}
            wrong = next((str(result) for result in said.values() if result != "OK"), "")
        except KafkaError as error:
            shorter, wrong = names, said_by_kafka(error)
        if shorter:
            _log.warning(
                "records of %s %s for %d hours (placement.kafka.retention_hours)%s", ", ".join(shorter),
                "may not be kept" if wrong else "are now kept", self._retention_hours,
                f": {printable(wrong, 500)}" if wrong else "",
            )  # fmt: skip

    def topic_names(self) -> set[str]:
        admin = self._connect(KafkaAdminClient)
        try:
            return set(admin.list_topics())
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self.bootstrap_servers}: topics can't be listed: {said_by_kafka(error)}"
            ) from error
        finally:
            admin.close()

    def broker_count(self) -> int:
        """Return how many brokers the cluster has."""
        admin = self._connect(KafkaAdminClient)
        try:
            return len(admin.describe_cluster()["brokers"])
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self.bootstrap_servers}: brokers can't be listed: {said_by_kafka(error)}"
            ) from error

    def delete_topics(self, names: Collection[str]) -> None:
        admin = self._connect(KafkaAdminClient)
        try:
            there = sorted(set(names) & set(admin.list_topics()))
            with contextlib.suppress(UnknownTopicOrPartitionError):  # another one removed it in between
                if there:
                    admin.delete_topics(there)
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self.bootstrap_servers}: topics can't be removed: {said_by_kafka(error)}"
            ) from error
        finally:
            admin.close()

    def _settings(self, topic: Topic) -> dict[str, Any]:
        settings = {"max.message.bytes": str(LARGEST_RECORD)}
        if topic.compacted:
            settings["cleanup.policy"] = "compact"
        else:
            hours = topic.retention_hours or self._retention_hours
            settings[_KEPT_MS] = "-1" if hours == FOR_EVER else str(hours * _HOUR_MS)
            if topic.retention_hours and hours != FOR_EVER:
                settings["segment.ms"] = str(hours * 900_000)  # Kafka deletes whole segments only
        if self._replication > 1:
            settings["min.insync.replicas"] = str(self._replication - 1)
        return {
            "num_partitions": topic.partitions,
            "replication_factor": self._replication,
            "configs": settings,
        }

    def writer(self, batch: int | None = None) -> KafkaWriter:
        producer = self._connect(
            KafkaProducer,
            acks="all",
            enable_idempotence=True,
            linger_ms=8,  # a busy generator finishes several samples in that time: one request for all
            batch_size=batch or _BATCH,
            max_request_size=LARGEST_RECORD,
            delivery_timeout_ms=int(self._delivery_s * 1000),
            request_timeout_ms=int(min(30.0, self._delivery_s / 2) * 1000),
            **_UNMETERED,
        )
        return KafkaWriter(producer, self.bootstrap_servers)

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> KafkaReader:  # fmt: skip
        consumer = self._connect(
            KafkaConsumer,
            enable_auto_commit=False,
            auto_offset_reset="none",  # a position that is gone is an error, never a silent jump
            fetch_max_wait_ms=_PATIENT_MS if patient else _WAIT_MS,
            max_partition_fetch_bytes=LARGEST_RECORD,
            **_UNMETERED,
        )
        return KafkaReader(consumer, topic, dict(start or {}), self.bootstrap_servers, only)

    def fetcher(self) -> KafkaFetcher:
        consumer = self._connect(
            KafkaConsumer,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=_WAIT_MS,
            max_partition_fetch_bytes=SMALL_BATCH,  # reads little beyond the wanted record
            **_UNMETERED,
        )
        return KafkaFetcher(consumer, self.bootstrap_servers)

    def close(self) -> None:
        """Do nothing: no connection is held between calls."""

    def check(self) -> None:
        """Raise BusError if the cluster can't be reached or used now. A client would try for a while."""
        if (found := trouble(self.bootstrap_servers, self._security)) is not None:
            raise self._refused(found)
        self._probed = True

    def check_listening(self) -> None:
        """Raise NoBroker if nobody listens, before anybody has waited for something else."""
        found = trouble(self.bootstrap_servers, self._security)
        if found is not None and self._is_gone(found):
            raise self._refused(found)

    def _connect(self, client: Any, **options: Any) -> Any:
        if not self._probed:
            found = trouble(self.bootstrap_servers, self._security)
            if found is not None and (found.lasting or self._is_gone(found)):
                raise self._refused(found)
            self._probed = found is None
        until = time.monotonic() + self._delivery_s
        while True:
            try:
                return client(**self._common, **options)
            except (KafkaError, OSError, ValueError) as error:
                found = trouble(self.bootstrap_servers, self._security)
                refused = self._refused(found or Trouble(said_by_kafka(error), False))
                may_pass = isinstance(error, KafkaError) and not refused.lasting
                if not (self._patient and may_pass) or time.monotonic() > until or self._stop.wait(0.5):
                    raise refused from error

    def _is_gone(self, found: Trouble | None) -> bool:
        """Whether nobody listens, also some seconds later. The client would try for five times as long."""
        begun = time.monotonic()
        while not self._patient and found is not None and found.at_once:
            if time.monotonic() - begun > _REFUSED_S:
                return True
            time.sleep(_REFUSED_S / 8)
            found = trouble(self.bootstrap_servers, self._security)
        return False

    def _refused(self, found: Trouble) -> BusError:
        advice = "" if found.lasting else (
            ". `streamrl up` starts the local one; a cluster of yours is placement.kafka.bootstrap_servers"
        )  # fmt: skip
        verb = "used" if found.lasting else "reached"
        error = NoBroker(f"Kafka at {self.bootstrap_servers} can't be {verb}: {found.what}{advice}")
        error.lasting = found.lasting
        return error


class KafkaSent:
    """A record that the broker has acknowledged or will acknowledge soon."""

    def __init__(self, future: Any, topic: Topic, broker: str) -> None:
        self._future, self._topic, self._broker = future, topic, broker

    def offset(self) -> int:
        found = self._future.value.offset if self._future.succeeded() else -1
        if found < 0:
            raise BusError(
                f"Kafka at {self._broker} does not say at which offset it wrote a record of "
                f"{self._topic.name}"
            )
        return int(found)


class KafkaWriter:
    """An idempotent producer that waits for all in-sync replicas."""

    def __init__(self, producer: KafkaProducer, broker: str) -> None:
        self._producer, self._broker = producer, broker
        self._failed: BaseException | None = None

    def send(self, topic: Topic, value: bytes, *, key: str, partition: int = 0) -> KafkaSent:
        self._raise_failure()
        try:
            future = self._producer.send(topic.name, value=value, key=key.encode(), partition=partition)
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker}: {topic.name} can't be written: {said_by_kafka(error)}"
            ) from error
        future.add_errback(self._remember)
        return KafkaSent(future, topic, self._broker)

    def flush(self, deadline_s: float) -> None:
        try:
            self._producer.flush(timeout=deadline_s)
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker} did not acknowledge all records within {deadline_s:g} s: "
                f"{said_by_kafka(error)}"
            ) from error
        self._raise_failure()

    def close(self) -> None:
        try:
            self._producer.close(timeout=10)
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker} did not acknowledge all records before the end: "
                f"{said_by_kafka(error)}"
            ) from error

    def _remember(self, error: BaseException) -> None:
        self._failed = self._failed or error

    def _raise_failure(self) -> None:
        if self._failed is not None:
            raise BusError(
                f"Kafka at {self._broker}: a record was not accepted: {said_by_kafka(self._failed)}"
            ) from self._failed


class KafkaReader:
    """A consumer that is assigned its partitions and keeps its own positions."""

    def __init__(
        self, consumer: KafkaConsumer, topic: Topic, start: dict[int, int], broker: str, only: int | None
    ) -> None:
        self._consumer, self._topic, self._broker = consumer, topic, broker
        numbers = range(topic.partitions) if only is None else [only]
        self._parts = [TopicPartition(topic.name, number) for number in numbers]
        consumer.assign(self._parts)
        unset = [part for part in self._parts if part.partition not in start]
        if unset:
            consumer.seek_to_beginning(*unset)
        for part in self._parts:
            if part.partition in start:
                consumer.seek(part, start[part.partition])

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        try:
            batches = self._consumer.poll(timeout_ms=int(wait_s * 1000), max_records=most)
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker}: {self._topic.name} can't be read: {said_by_kafka(error)}"
            ) from error
        return [
            Record(record.topic, record.partition, record.offset, record.key or b"", record.value or b"")
            for batch in batches.values()
            for record in batch
        ]

    def begin_offsets(self) -> dict[int, int]:
        try:
            return {part.partition: at for part, at in self._consumer.beginning_offsets(self._parts).items()}
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker}: the first offsets of {self._topic.name} can't be read: "
                f"{said_by_kafka(error)}"
            ) from error

    def end_offsets(self) -> dict[int, int]:
        try:
            return {part.partition: end for part, end in self._consumer.end_offsets(self._parts).items()}
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker}: the last offsets of {self._topic.name} can't be read: "
                f"{said_by_kafka(error)}"
            ) from error

    def positions(self) -> dict[int, int]:
        return {part.partition: self._consumer.position(part) for part in self._parts}

    def seek(self, positions: Mapping[int, int]) -> None:
        for partition, offset in positions.items():
            self._consumer.seek(TopicPartition(self._topic.name, partition), offset)

    def close(self) -> None:
        self._consumer.close()
