"""Fetches single records from Kafka by position, with a consumer that is idle until it is asked.

A broker answers with whole batches, so records near the wanted one come with it. The ones before it are kept
only if the consumer stands before them, so it begins a little before the wanted record. It reads on to a
wanted record that is close, and seeks one that is farther away. A position that a topic does not have is no
error here: the message that named it may be wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError, OffsetOutOfRangeError

from infra.bus import SMALL_BATCH, BusError, Record
from infra.waiting import Wait
from schemas.topics import Topic

_NEAR = 64  # records: a gap up to this size is read over, a larger one is skipped by a seek
_POLL_MS = 400
_MOST = 500
_USUAL_BYTES = 4 << 10  # of a record, before any was seen


class KafkaFetcher:
    """Fetches the wanted records in the caller's thread."""

    def __init__(self, consumer: KafkaConsumer, broker: str) -> None:
        self._consumer, self._broker = consumer, broker
        self._record_bytes: dict[str, int] = {}  # by topic: mean of the newest records

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        left = {
            TopicPartition(topic.name, partition): sorted({offset for offset in offsets if offset >= 0})
            for partition, offsets in wanted.items()
            if 0 <= partition < topic.partitions
        }
        try:
            return self._fetch(
                topic, {part: offsets for part, offsets in left.items() if offsets}, deadline_s
            )
        except KafkaError as error:
            raise BusError(
                f"Kafka at {self._broker}: records of {topic.name} can't be fetched: "
                f"{error or type(error).__name__}"
            ) from error

    def _fetch(
        self, topic: Topic, left: dict[TopicPartition, list[int]], deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        wait = Wait(f"records of {topic.name}", unblocked_by="the Kafka broker", deadline_s=deadline_s)
        found: dict[tuple[int, int], Record] = {}
        if left:
            self._consumer.assign(list(left))
        for part, offsets in left.items():
            self._seek(part, offsets[0])
        while left:
            before = sum(map(len, left.values()))
            for part, records in self._poll().items():
                self._take(part, records, left, found)
            if sum(map(len, left.values())) < before:
                wait.progress()
            else:
                self._drop_what_is_not_there(left)
                wait.check()
        return found

    def _seek(self, part: TopicPartition, offset: int) -> None:
        """Go to the record at an offset, or to some before it that are likely to come with it anyway."""
        before = SMALL_BATCH // 2 // self._record_bytes.get(part.topic, _USUAL_BYTES)
        self._consumer.seek(part, max(0, offset - min(before, _NEAR)))

    def _poll(self) -> dict[TopicPartition, list[Any]]:
        try:
            return dict(self._consumer.poll(timeout_ms=_POLL_MS, max_records=_MOST))
        except OffsetOutOfRangeError:
            return {}

    def _take(
        self, part: TopicPartition, records: list[Any], left: dict[TopicPartition, list[int]],
        found: dict[tuple[int, int], Record],
    ) -> None:  # fmt: skip
        for one in records:
            found[one.partition, one.offset] = Record(
                one.topic, one.partition, one.offset, one.key or b"", one.value or b""
            )
        sizes = sum(len(one.key or b"") + len(one.value or b"") for one in records)
        self._record_bytes[part.topic] = max(1, sizes // len(records))
        behind = records[-1].offset + 1
        if part not in left:
            return
        offsets = [offset for offset in left[part] if offset >= behind]
        if not offsets:
            del left[part]
            return
        left[part] = offsets
        if offsets[0] > behind + _NEAR:
            self._seek(part, offsets[0])

    def _drop_what_is_not_there(self, left: dict[TopicPartition, list[int]]) -> None:
        """Stop waiting for positions that the topic does not have. Called when a poll brought nothing."""
        parts = list(left)
        begins, ends = self._consumer.beginning_offsets(parts), self._consumer.end_offsets(parts)
        for part in parts:
            offsets = [offset for offset in left[part] if begins[part] <= offset < ends[part]]
            if not offsets:
                del left[part]
            elif offsets != left[part] or self._consumer.position(part) < begins[part]:
                left[part] = offsets
                self._consumer.seek(part, offsets[0])
        if left:
            self._consumer.assign(list(left))

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()
