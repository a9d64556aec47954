"""A bus for reading alone, over records that lie elsewhere than on a broker: in a file, or in an archive.

Records keep their partitions and offsets. Offsets between them may be missing.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

from infra.bus import BusError, Record
from schemas.topics import Topic


class Stock(Protocol):
    """The records of one topic."""

    def begin(self, partition: int) -> int:
        """Return the offset of a partition's first record; 0 if it has none."""

    def end(self, partition: int) -> int:
        """Return the offset behind a partition's last record; 0 if it has none."""

    def read(self, partition: int, offset: int, most: int) -> Sequence[Record]:
        """Return at most `most` records of a partition from an offset on, in order."""


class HeldStock:
    """Records that are held in memory."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._parts: dict[int, list[Record]] = {}
        for record in sorted(records, key=lambda one: (one.partition, one.offset)):
            self._parts.setdefault(record.partition, []).append(record)
        self._offsets = {part: [one.offset for one in records] for part, records in self._parts.items()}

    def begin(self, partition: int) -> int:
        offsets = self._offsets.get(partition)
        return offsets[0] if offsets else 0

    def end(self, partition: int) -> int:
        offsets = self._offsets.get(partition)
        return offsets[-1] + 1 if offsets else 0

    def read(self, partition: int, offset: int, most: int) -> Sequence[Record]:
        at = bisect.bisect_left(self._offsets.get(partition, []), offset)
        return self._parts.get(partition, [])[at : at + most]


class StockBus:
    """The bus over some stocks, by the names of their topics. `what` names it in errors."""

    def __init__(self, stocks: Mapping[str, Stock], what: str) -> None:
        self._stocks, self._what = stocks, what

    def create_topics(self, topics: Sequence[Topic]) -> None:
        self._refuse()

    def topic_names(self) -> set[str]:
        return set(self._stocks)

    def delete_topics(self, names: Collection[str]) -> None:
        self._refuse()

    def writer(self, batch: int | None = None) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise BusError(f"{self._what} can only be read")

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> StockReader:  # fmt: skip
        stock = self._stocks.get(topic.name, HeldStock(()))
        parts = range(topic.partitions) if only is None else [only]
        return StockReader(stock, {part: (start or {}).get(part, stock.begin(part)) for part in parts})

    def fetcher(self) -> StockFetcher:
        return StockFetcher(self._stocks)

    def close(self) -> None:
        pass


class StockReader:
    """Reads a stock's partitions. As no record ever comes, it waits only if it is polled at the end."""

    def __init__(self, stock: Stock, start: dict[int, int]) -> None:
        self._stock, self._positions = stock, start

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        found: list[Record] = []
        for part, position in self._positions.items():
            if len(found) < most and (batch := self._next(part, position, most - len(found))):
                self._positions[part] = batch[-1].offset + 1
                found += batch
        if not found:
            time.sleep(wait_s)
        return found

    def _next(self, part: int, position: int, most: int) -> Sequence[Record]:
        """Return records from a position on; go to the end if there are none, as it may be behind a gap."""
        if batch := self._stock.read(part, position, most):
            return batch
        if (end := self._stock.end(part)) > position and not (
            batch := self._stock.read(part, position, most)
        ):
            self._positions[part] = end
        return batch

    def begin_offsets(self) -> dict[int, int]:
        return {part: self._stock.begin(part) for part in self._positions}

    def end_offsets(self) -> dict[int, int]:
        return {part: self._stock.end(part) for part in self._positions}

    def positions(self) -> dict[int, int]:
        return dict(self._positions)

    def seek(self, positions: Mapping[int, int]) -> None:
        self._positions.update(positions)

    def close(self) -> None:
        pass


class StockFetcher:
    """Looks up single records in stocks."""

    def __init__(self, stocks: Mapping[str, Stock]) -> None:
        self._stocks = stocks

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        found: dict[tuple[int, int], Record] = {}
        for partition, offsets in wanted.items():
            stock = self._stocks.get(topic.name)
            for offset in offsets if stock is not None and 0 <= partition < topic.partitions else ():
                assert stock is not None
                for record in stock.read(partition, max(0, offset), 1):
                    if record.offset == offset:
                        found[partition, offset] = record
        return found

    def close(self) -> None:
        pass
