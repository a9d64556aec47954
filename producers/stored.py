"""Fetches messages that others name by their position, and keeps them for a while.

Among a thousand generators, a prompt is needed by the few that make its samples. Each of these fetches it,
with the small batch in which the feeder wrote it; following the topic would bring every prompt to everyone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic

from infra.bus import Fetcher, Record
from infra.gate import Gate
from producers.dispatch.jobs import RecordPlace
from schemas.topics import Topic
from schemas.wire import MessageT


class Stored(Generic[MessageT]):
    """Fetches records of one topic by position. At most `most_bytes` bytes of them are kept."""

    def __init__(
        self, fetcher: Fetcher, topic: Topic, kind: type[MessageT], run: str, *, most_bytes: int,
        deadline_s: float,
    ) -> None:  # fmt: skip
        self._fetcher, self._topic, self._deadline_s = fetcher, topic, deadline_s
        self._gate = Gate(kind, run, self._refuse)
        self._refused: dict[RecordPlace, str] = {}
        self._kept: OrderedDict[RecordPlace, bytes] = OrderedDict()  # the last used come last
        self._most_bytes, self.bytes = most_bytes, 0

    def get(self, places: Collection[RecordPlace]) -> dict[RecordPlace, MessageT | str]:
        """Return the message at each place, or the reason why there is none."""
        self._refused.clear()
        records = self._records(places)
        found: dict[RecordPlace, MessageT | str] = {}
        for place in places:
            if (record := records.get(place)) is None:
                found[place] = f"nothing stands at {self._topic.name}[{place.partition}]@{place.offset}"
            elif (message := self._gate.take_one(record)) is None:
                found[place] = f"{record.place} can't be used: {self._refused[place]}"
            else:
                found[place] = message
        return found

    def _records(self, places: Collection[RecordPlace]) -> dict[RecordPlace, Record]:
        found: dict[RecordPlace, Record] = {}
        missing: dict[int, list[int]] = {}
        for place in places:
            if (value := self._kept.get(place)) is None:
                missing.setdefault(place.partition, []).append(place.offset)
            else:
                self._kept.move_to_end(place)
                found[place] = Record(self._topic.name, *place, b"", value)
        if missing:
            came = self._fetcher.fetch(self._topic, missing, deadline_s=self._deadline_s)
            for (partition, offset), record in came.items():
                found[RecordPlace(partition, offset)] = record
                self._keep(RecordPlace(partition, offset), record.value)
        return found

    def _keep(self, place: RecordPlace, value: bytes) -> None:
        if place in self._kept:
            return
        self._kept[place] = value
        self.bytes += len(value)
        while self.bytes > self._most_bytes:
            self.bytes -= len(self._kept.popitem(last=False)[1])

    def _refuse(self, record: Record, reason: str) -> None:
        self._refused[RecordPlace(record.partition, record.offset)] = reason
