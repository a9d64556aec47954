"""The records that can't be used and that a user told a run to go on past, with `streamrl skip`.

runs/<run>/skipped.json    the list, written whole

Most records that can't be used are passed over and reported. If passing one over would change what is trained
(it is a step of the run's own ledger), the run stops and names the record. A record in this list no longer
stops the run.
"""

from __future__ import annotations

import json
import re
import time

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.bus import Record
from infra.errors import Explained
from infra.stores.store import Missing, Store

_MOST = 10_000
_LARGEST = 32 << 20  # bytes of a list: so many records with long reasons need half of them
_PLACE = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249})\[(?P<partition>\d{1,9})\]@(?P<offset>\d{1,18})")

SkippedPlace = tuple[str, int, int]  # topic, partition, offset


class SkipError(Explained):
    """A place that can't be skipped, or a list that can't be read."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    topic: str = Field(max_length=249)
    partition: int = Field(ge=0)
    offset: int = Field(ge=0)
    why: str = Field(max_length=1000)  # the reason why the record can't be used
    at: float


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int = Field(1, ge=1, le=1)
    records: list[_Entry] = Field([], max_length=_MOST)


def skipped(store: Store, run: str) -> frozenset[SkippedPlace]:
    """Return the places of the records that a run goes on past."""
    return frozenset((one.topic, one.partition, one.offset) for one in _read(store, run).records)


def add_skipped(store: Store, run: str, place: SkippedPlace, why: str) -> None:
    """Add a place to the list, unless it is there. Raise SkipError if the list is full."""
    found = _read(store, run)
    if place in {(one.topic, one.partition, one.offset) for one in found.records}:
        return
    if len(found.records) >= _MOST:
        raise SkipError(
            f"{store.url}/{_key(run)} names {_MOST} records already, which is too many: start a new run "
            "from the newest weights of this one"
        )
    topic, partition, offset = place
    entry = _Entry(topic=topic, partition=partition, offset=offset, why=why[:1000], at=time.time())
    found = found.model_copy(update={"records": [*found.records, entry]})
    store.put(_key(run), found.model_dump_json(indent=1).encode())


def place_of(record: Record) -> SkippedPlace:
    """Return the place of a record."""
    return record.topic, record.partition, record.offset


def parsed_place(text: str) -> SkippedPlace:
    """Parse a place from TOPIC[PARTITION]@OFFSET, as messages name a record, or raise SkipError."""
    if (found := _PLACE.fullmatch(text.strip())) is None:
        raise SkipError(
            f"{text[:300]!r} is no place of a record: write TOPIC[PARTITION]@OFFSET, as in the message "
            "that names the record, such as count-1.ledger[0]@17"
        )
    return found["topic"], int(found["partition"]), int(found["offset"])


def _read(store: Store, run: str) -> _File:
    try:
        raw = store.get(_key(run), _LARGEST)
    except Missing:
        return _File()
    try:
        if len(raw) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        return _File.model_validate(json.loads(raw))
    except (ValidationError, ValueError, RecursionError) as error:
        raise SkipError(
            f"{store.url}/{_key(run)} is no list of records to skip: {str(error)[:500]}. Remove the file, "
            "and run `streamrl skip` again for each record at which the run stops"
        ) from error


def _key(run: str) -> str:
    return f"runs/{run}/skipped.json"
