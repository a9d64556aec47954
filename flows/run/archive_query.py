"""Answers questions in SQL about a run, over archive and log as one table for each topic.

archive ── files, of which a query reads the columns it needs ──┐
log ────── records that are not archived yet, in memory ────────┴──► a view for each topic ──► DuckDB

A query sees the views and nothing else: files, network, extensions, settings and variables of this process
are closed to it before it is run, and it has to be one SELECT.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flows.run.locations import named_store
from infra.archive.archive_alone import archive_bus, with_advice
from infra.archive.archive_reading import ArchiveIndex
from infra.archive.archived_topics import KINDS, archived_topics
from infra.bus import Bus, NoBroker, Record
from infra.errors import Explained
from infra.run_bus import connect
from infra.runs import RunRecord, find
from infra.stores.store import Store
from infra.waiting import Wait
from schemas.topics import Topic, Topics

VIEWS = {
    "samples": "samples", "steps": "ledger", "prompts": "prompts", "evals": "evals", "dead": "dead",
    "weights": "weights", "rankers": "ranker",
}  # fmt: skip
_NOT_SHOWN = "log_key, log_value, log_fault"
_MOST_BYTES = 1 << 30  # of records that are in the log alone
_BATCH = 2_000
_LOCKS = (
    "SET python_enable_replacements = false", "SET enable_external_access = false",
    "SET lock_configuration = true",
)  # fmt: skip


class QueryError(Explained):
    """A query that can't be answered, and why."""

    lasting = True


@dataclass(frozen=True)
class QueryAnswer:
    """The answer to a query: names of columns, and rows in chunks."""

    columns: list[str]
    rows: Iterator[Sequence[tuple[Any, ...]]]


@contextmanager
def query(
    run: str, sql: str, store_name: str = "local", *, archive_alone: bool = False
) -> Iterator[QueryAnswer]:
    """Answer a query about a run. Raises QueryError if it can't be answered.

    `archive_alone`: what is not archived yet is left out, and no broker is asked.
    """
    store = named_store(store_name)
    record = find(store, run)
    if archive_alone:
        archive_bus(record, store)  # raises ArchiveError if there is none
        with answered(None, store, record, sql) as answer:
            yield answer
        return
    bus = connect(record, "streamrl-sql")
    try:
        with answered(bus, store, record, sql) as answer:
            yield answer
    except NoBroker as error:
        raise with_advice(error, record, store) from error
    finally:
        bus.close()


@contextmanager
def answered(bus: Bus | None, store: Store, record: RunRecord, sql: str) -> Iterator[QueryAnswer]:
    """Answer a query about a run on an open bus: that of the log alone; None: ask the archive alone."""
    import duckdb

    off: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False, "autoload_known_extensions": False,
    }  # fmt: skip
    connection = duckdb.connect(":memory:", config=off)
    try:
        _check(connection, sql)
        named = {
            view: short for view, short in VIEWS.items() if re.search(rf"\b{view}\b", sql, re.IGNORECASE)
        }
        for view, short in named.items():
            _add_view(connection, view, short, bus, store, record)
        for lock in _LOCKS:
            connection.execute(lock)
        found = connection.execute(sql)
        columns = [name for name, *_ in found.description or ()]
        yield QueryAnswer(columns, iter(lambda: found.fetchmany(_BATCH), []))
    except duckdb.Error as error:
        raise QueryError(f"the query can't be answered: {error}") from error
    finally:
        connection.close()


def _check(connection: Any, sql: str) -> None:
    import duckdb

    statements = connection.extract_statements(sql)
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise QueryError("one SELECT is expected: a query changes nothing")


def _add_view(
    connection: Any, view: str, short: str, bus: Bus | None, store: Store, record: RunRecord
) -> None:  # fmt: skip
    """Make the view of a topic. Of a step the first record counts, as it does for a trainer."""
    import pyarrow.dataset as ds

    from infra.archive.archive_tables import archived_table

    index = ArchiveIndex(store, record.id, record.identity)
    newest = index.newest()
    topic = archived_topics(Topics(record.id, record.spec.lengths.classes))[short]
    spans = (
        {one.partition: one.end for one in newest.spans if one.topic == short} if newest is not None else {}
    )
    archived = archived_table(index, newest, short)
    unarchived = ds.dataset(_in_log(bus, topic, short, spans, record.spec.deadlines.progress_s))
    connection.register(f"archived_{view}", archived)
    connection.register(f"unarchived_{view}", unarchived)
    both = f"SELECT * FROM archived_{view} UNION ALL SELECT * FROM unarchived_{view}"  # noqa: S608 - our names
    of_run = "log_fault IS NULL AND run = '" + record.id.replace("'", "''") + "'"
    first = (
        " QUALIFY row_number() OVER (PARTITION BY step ORDER BY log_offset) = 1" if view == "steps" else ""
    )
    connection.execute(
        f"CREATE VIEW {view} AS SELECT * EXCLUDE ({_NOT_SHOWN}) FROM ({both}) WHERE {of_run}{first}"  # noqa: S608
    )


def _in_log(bus: Bus | None, topic: Topic, short: str, archived: dict[int, int], deadline_s: float) -> Any:
    """Return the records that are in the log alone, as a table."""
    import pyarrow as pa

    from infra.archive.columns import schema_of, to_table

    tables = [schema_of(KINDS[short]).empty_table()]
    if bus is None or topic.name not in bus.topic_names():
        return tables[0]
    reader = bus.reader(topic)
    try:
        begins, ends = reader.begin_offsets(), reader.end_offsets()
        start = {part: max(begin, archived.get(part, 0)) for part, begin in begins.items()}
        reader.seek({part: min(at, max(ends[part], begins[part])) for part, at in start.items()})
        wait = Wait(f"records of {topic.name}", unblocked_by="the Kafka broker", deadline_s=deadline_s)
        left = {part: end for part, end in ends.items() if end > start[part]}
        size, held = 0, list[Record]()
        while left:
            batch = reader.poll(0.2, _BATCH)
            wait.progress() if batch else wait.check()
            held += [one for one in batch if one.offset < ends[one.partition]]
            size += sum(len(one.value) for one in batch)
            if size > _MOST_BYTES:
                raise QueryError(
                    f"more than {_MOST_BYTES >> 20} MiB of {topic.name} are not archived yet, too many to be "
                    f"read for a query: call `streamrl archive {topic.name.rpartition('.')[0]}` first"
                )
            positions = reader.positions()
            left = {part: end for part, end in left.items() if positions[part] < end}
            if held and (len(held) >= 10 * _BATCH or not left):
                tables.append(to_table(held, KINDS[short]))
                held = []
        return pa.concat_tables(tables)
    finally:
        reader.close()
