"""Records that are in the log alone, as a table for queries.

    query ──► the columns it needs ──► records, some at a time ──► these columns of them

A query says which columns it needs only when it runs. So the log is read then, and never held in memory.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from infra.archive.archived_topics import KINDS
from infra.archive.columns import schema_of, to_table
from infra.archive.lent_to_arrow import LentToArrow
from infra.bus import Bus, Reader, Record
from infra.waiting import Wait
from schemas.topics import Topic

_BATCH = 2_000  # records that become a batch of rows
_BATCH_BYTES = 8 << 20


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Have no garbage collected by search for a moment: thousands of messages at once would set it off."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class UnarchivedTable(ds.InMemoryDataset):
    """The records of a topic behind the archived ones, up to where the log ended when it was first read.

    `error`: that ended a reading; DuckDB keeps only its text.
    """

    def __init__(
        self,
        bus: Bus,
        topic: Topic,
        short: str,
        archived: Mapping[int, int],
        deadline_s: float,
        lent: LentToArrow,
    ) -> None:
        """`archived`: where each partition's archive ends."""
        self._schema = schema_of(KINDS[short])
        super().__init__(self._schema.empty_table())
        self._bus, self._topic, self._kind = bus, topic, KINDS[short]
        self._archived, self._deadline_s, self._lent = archived, deadline_s, lent
        self._ends: dict[int, int] | None = None
        self.error: Exception | None = None

    def scanner(self, columns: list[str] | None = None, filter: Any = None, **_: Any) -> ds.Scanner:  # noqa: A002
        """Return a reading of some columns; DuckDB calls this. `filter`: which rows it needs."""
        said = str(filter) if filter is not None else ""
        needed = [
            field
            for field in self._schema
            if columns is None or field.name in columns or re.search(rf"\b{field.name}\b", said)
        ]
        schema = pa.schema(needed)
        batches = self._lent.lend(self._batches(schema))
        return ds.Scanner.from_batches(batches, schema=schema, columns=columns, filter=filter)

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            for records in self._records():
                with _no_search_for_cycles():
                    table = to_table(records, self._kind, schema.names)
                yield from table.to_batches()
        except Exception as error:
            self.error = error
            raise

    def _records(self) -> Iterator[list[Record]]:
        """Yield the records, some at a time."""
        if self._topic.name not in self._bus.topic_names():
            return
        reader = self._bus.reader(self._topic)
        try:
            yield from self._read(reader)
        finally:
            reader.close()

    def _read(self, reader: Reader) -> Iterator[list[Record]]:
        begins = reader.begin_offsets()
        if self._ends is None:
            self._ends = reader.end_offsets()
        ends = {part: max(end, begins[part]) for part, end in self._ends.items()}
        start = {part: min(max(begins[part], self._archived.get(part, 0)), ends[part]) for part in begins}
        reader.seek(start)
        wait = Wait(
            f"records of {self._topic.name}", unblocked_by="the Kafka broker", deadline_s=self._deadline_s
        )
        left = {part: end for part, end in ends.items() if end > start[part]}
        held, size = list[Record](), 0
        while left:
            batch = reader.poll(0.2, _BATCH)
            wait.progress() if batch else wait.check()
            mine = [one for one in batch if one.offset < ends[one.partition]]
            held += mine
            size += sum(len(one.value) for one in mine)
            positions = reader.positions()
            left = {part: end for part, end in left.items() if positions[part] < end}
            if held and (len(held) >= _BATCH or size >= _BATCH_BYTES or not left):
                yield held
                held, size = [], 0
