"""Answers questions in SQL about a run, over archive and log as one table for each topic.

archive ── files, of which a query reads the columns it needs ──┐
log ────── records that are not archived yet, the same columns ─┴──► a view for each topic ──► DuckDB

A query sees the views and nothing else: files, network, extensions, settings and variables of this process
are closed to it before it is run, and it has to be one SELECT.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flows.run.locations import named_store, store_option
from infra.archive.archive_alone import archive_bus, with_advice
from infra.archive.archive_reading import ArchiveIndex
from infra.archive.archived_topics import archived_topics
from infra.archive.lent_to_arrow import LentToArrow
from infra.bus import Bus, NoBroker
from infra.errors import Explained
from infra.run_bus import connect
from infra.runs import RunRecord, find
from infra.stores.store import Store
from schemas.topics import Topics

if TYPE_CHECKING:
    from infra.archive.unarchived_table import UnarchivedTable

VIEWS = {
    "samples": "samples", "steps": "ledger", "prompts": "prompts", "evals": "evals", "dead": "dead",
    "weights": "weights", "rankers": "ranker",
}  # fmt: skip
_NOT_SHOWN = "log_key, log_value, log_fault"
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
    """The answer to a query: names of columns, of which none comes twice, and rows in chunks."""

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
        archive_bus(record, store, store_option(store_name))  # raises ArchiveError if there is none
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

    in_log: list[UnarchivedTable] = []
    lent = LentToArrow()
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
            index = ArchiveIndex(store, record.id, record.identity, still=True)
            if bus is not None:
                in_log.append(_unarchived(bus, index, short, record, lent))
            _add_view(connection, view, short, index, in_log[-1] if bus is not None else None, lent)
        for lock in _LOCKS:
            connection.execute(lock)
        found = connection.execute(sql)
        columns = _distinct([name for name, *_ in found.description or ()])
        yield QueryAnswer(columns, iter(lambda: found.fetchmany(_BATCH), []))
    except duckdb.Error as error:
        if (met := next((one.error for one in in_log if one.error is not None), None)) is not None:
            raise met from error
        raise QueryError(f"the query can't be answered: {error}") from error
    finally:
        connection.close()
        lent.wait()


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names of columns of which none comes twice: a JSON object keeps one value of a name."""
    found: dict[str, None] = {}
    for name in names:
        tries = (f"{name}_{number}" for number in itertools.count(2))
        found[name if name not in found else next(one for one in tries if one not in {*names, *found})] = None
    return list(found)


def _check(connection: Any, sql: str) -> None:
    import duckdb

    statements = connection.extract_statements(sql)
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        raise QueryError("one SELECT is expected: a query changes nothing")


def _unarchived(
    bus: Bus, index: ArchiveIndex, short: str, record: RunRecord, lent: LentToArrow
) -> UnarchivedTable:
    """Return the records of a topic that are in the log alone, as a table."""
    from infra.archive.unarchived_table import UnarchivedTable

    topic, newest = archived_topics(Topics(record.id, record.spec.lengths.classes))[short], index.newest()
    spans = newest.spans if newest is not None else ()
    ends = {one.partition: one.end for one in spans if one.topic == short}
    return UnarchivedTable(bus, topic, short, ends, record.spec.deadlines.progress_s, lent)


def _add_view(
    connection: Any, view: str, short: str, index: ArchiveIndex, in_log: UnarchivedTable | None,
    lent: LentToArrow,
) -> None:  # fmt: skip
    """Make the view of a topic. Of a step the first record counts, as it does for a trainer."""
    from infra.archive.archive_tables import archived_table

    connection.register(f"archived_{view}", archived_table(index, index.newest(), short, lent))
    tables = [f"archived_{view}"]
    if in_log is not None:
        connection.register(f"unarchived_{view}", in_log)
        tables.append(f"unarchived_{view}")
    all_of_them = " UNION ALL ".join(f"SELECT * FROM {table}" for table in tables)  # noqa: S608 - our names
    of_run = "log_fault IS NULL AND run = '" + index.run.replace("'", "''") + "'"
    first = (
        " QUALIFY row_number() OVER (PARTITION BY step ORDER BY log_offset) = 1" if view == "steps" else ""
    )
    connection.execute(
        f"CREATE VIEW {view} AS SELECT * EXCLUDE ({_NOT_SHOWN}) FROM ({all_of_them}) WHERE {of_run}{first}"  # noqa: S608
    )
