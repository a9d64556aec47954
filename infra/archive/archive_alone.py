"""Reads a run from its archive alone, where no broker is: long after the run, or on another machine."""

from __future__ import annotations

from contextlib import suppress

from infra.archive.archive_stocks import ArchiveStocks
from infra.archive.segments import ArchiveError
from infra.bus import NoBroker
from infra.errors import Explained
from infra.runs import RunRecord, find
from infra.stock_bus import StockBus
from infra.stores.store import Store
from schemas.messages import StepRecord
from schemas.topics import Topics
from schemas.wire import Unreadable, decode

_TAIL = 64  # records at the end of the ledger, of which one should be a step


def archive_bus(record: RunRecord, store: Store, store_option: str = "") -> StockBus:
    """Return a run's archive as a bus that can only be read. Raises ArchiveError if there is none.

    It stays as it is now, so all topics fit together. If an offline run trained the samples of another run,
    that run's archive is on it, too.
    """
    stocks = _stocks(record, store)
    index = stocks.index(record.id)
    if index is None or index.newest() is None:
        raise ArchiveError(
            f"run {record.id} has no archive in {store.url}: while its broker is there, "
            f"`{f'streamrl archive {record.id} {store_option}'.rstrip()}` makes one"
        )
    return StockBus(stocks, f"the archive of run {record.id}")


def archived_up_to(record: RunRecord, store: Store) -> int | None:
    """Return the newest step in a run's archive; None if it has none. Raises Explained if it is damaged."""
    stocks = _stocks(record, store)
    ledger = stocks.get(Topics(record.id, record.spec.lengths.classes).ledger.name)
    newest = None
    if ledger is None:
        return None
    at = max(ledger.begin(0), ledger.end(0) - _TAIL)
    while found := ledger.read(0, at, _TAIL):  # of one segment at a time
        at = found[-1].offset + 1
        for one in found:
            with suppress(Unreadable):
                step = decode(one.value, StepRecord)
                if step.run == record.id:
                    newest = step.step if newest is None else max(newest, step.step)
    return newest


def with_advice(error: NoBroker, record: RunRecord, store: Store) -> NoBroker:
    """Return the error with what can be done without the broker of a run, if anything can."""
    try:
        newest = archived_up_to(record, store)
    except Explained:
        return error
    if newest is None:
        return error
    found = NoBroker(
        f"{error}. The archive of run {record.id} needs no broker, and goes up to step {newest}: say "
        "--archive to read it alone (in Python: archive_alone=True)"
    )
    found.lasting = error.lasting
    return found


def _stocks(record: RunRecord, store: Store) -> ArchiveStocks:
    return ArchiveStocks(
        store, lambda run: record.identity if run == record.id else find(store, run).identity, still=True
    )
