"""The log and its archive as one bus: records that retention has removed come from the archive.

position   0 ──────── archive ────────► where the log begins now ──── log ────► end
                          └── what is in both is read from the log

Positions behind a gap, where retention was quicker than the archive, are as gone as without an archive. A
compacted topic is never read from the archive: of each key its newest record is always there. Nothing of an
archive is looked at before a position is needed that the log does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from infra.archive.archive_reading import ArchiveStock
from infra.archive.archive_stocks import ArchiveStocks, IdentityOf
from infra.archive.archived_topics import KINDS, split_name
from infra.bus import Bus, Fetcher, Reader, Record, Writer
from infra.stores.store import Store
from schemas.topics import Topic


class JoinedBus:
    """A bus, and the archives of the runs whose topics are on it."""

    def __init__(self, log: Bus, store: Store, identity_of: IdentityOf) -> None:
        """`identity_of`: raises Explained if the store has no such run."""
        self._log, self._stocks = log, ArchiveStocks(store, identity_of)

    def stock(self, topic: Topic) -> ArchiveStock | None:
        """Return the archive of a topic; None if it can't have one."""
        return None if topic.compacted else self._stocks.get(topic.name)

    def create_topics(self, topics: Sequence[Topic]) -> None:
        self._log.create_topics(topics)

    def topic_names(self) -> set[str]:
        return self._log.topic_names()

    def delete_topics(self, names: Collection[str]) -> None:
        self._log.delete_topics(names)

    def writer(self, batch: int | None = None) -> Writer:
        return self._log.writer(batch)

    def reader(
        self, topic: Topic, start: Mapping[int, int] | None = None, *, only: int | None = None,
        patient: bool = False,
    ) -> Reader:  # fmt: skip
        log = self._log.reader(topic, start, only=only, patient=patient)
        if topic.compacted or split_name(topic.name)[1] not in KINDS:
            return log
        try:
            begins = log.begin_offsets()
            if not any(begins.values()) or (stock := self.stock(topic)) is None:
                return log  # nothing was ever removed; what is removed while it reads, it has passed
            joined = JoinedReader(log, stock, begins)
            joined.seek({part: (start or {}).get(part, joined.begin_offsets()[part]) for part in begins})
            return joined
        except BaseException:
            log.close()
            raise

    def fetcher(self) -> Fetcher:
        return JoinedFetcher(self._log.fetcher(), self.stock)

    def close(self) -> None:
        self._log.close()


class JoinedReader:
    """Reads a topic's old records from the archive, and all others from the log."""

    def __init__(self, log: Reader, stock: ArchiveStock, begins: dict[int, int]) -> None:
        self._log, self._stock, self._begins = log, stock, begins
        self._old: dict[int, int] = {}  # positions of partitions that are read from the archive now

    def poll(self, wait_s: float, most: int = 500) -> list[Record]:
        found: list[Record] = []
        while self._old and not found:
            for part, position in list(self._old.items()):
                batch = self._stock.read(part, position, most - len(found))
                if batch:
                    found += batch
                    self._old[part] = batch[-1].offset + 1
                elif len(found) < most:
                    self._old[part] = max(position, self._stock.reach(part, position)[1])
                    self._to_log(part, exhausted=True)
                if batch and self._old[part] >= self._begins[part]:
                    self._to_log(part, exhausted=False)
        return found or self._log.poll(wait_s, most)

    def _to_log(self, part: int, *, exhausted: bool) -> None:
        """Go on in the log. If that has lost the position meanwhile, the archive has it, or nobody."""
        position, self._begins = self._old.pop(part), self._log.begin_offsets()
        if position < self._begins[part] and not exhausted:
            self._old[part] = position
        else:
            self._log.seek({part: position})

    def begin_offsets(self) -> dict[int, int]:
        self._begins = self._log.begin_offsets()
        return {part: self._begin(part, begin) for part, begin in self._begins.items()}

    def _begin(self, part: int, begin: int) -> int:
        """Return where a partition begins, in the archive if that reaches to the log."""
        if not begin:
            return begin
        since, end = self._stock.reach(part, begin)
        return min(begin, since) if end >= begin else begin

    def end_offsets(self) -> dict[int, int]:
        return self._log.end_offsets()

    def positions(self) -> dict[int, int]:
        return self._log.positions() | self._old

    def seek(self, positions: Mapping[int, int]) -> None:
        in_log = {}
        for part, position in positions.items():
            self._old.pop(part, None)
            begin = self._begins[part]
            if position < begin and self._begin(part, begin) <= position:
                self._old[part] = position
                in_log[part] = begin
            else:
                in_log[part] = position
        self._log.seek(in_log)

    def close(self) -> None:
        self._log.close()


class JoinedFetcher:
    """Looks up single records in the log, and those that it does not have any more in the archive."""

    def __init__(self, log: Fetcher, stock_of: Callable[[Topic], ArchiveStock | None]) -> None:
        self._log, self._stock_of = log, stock_of

    def fetch(
        self, topic: Topic, wanted: Mapping[int, Collection[int]], *, deadline_s: float
    ) -> dict[tuple[int, int], Record]:
        found = self._log.fetch(topic, wanted, deadline_s=deadline_s)
        for part, offsets in wanted.items():
            missing = [
                one
                for one in offsets
                if 0 <= part < topic.partitions and one >= 0 and (part, one) not in found
            ]
            stock = self._stock_of(topic) if missing else None
            for offset in sorted(missing) if stock is not None else ():
                assert stock is not None
                for record in stock.read(part, offset, 1):
                    if record.offset == offset:
                        found[part, offset] = record
        return found

    def close(self) -> None:
        self._log.close()
