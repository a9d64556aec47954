"""The owner of a run's topics: runs in two stores may share an id, and a broker has topics for only one.

`<run>.owner` holds one record: the identity of the run that the topics were made for, and where its store is.
The record is written when the topics are made; if two runs write at once, the first record counts. Every
process of a run reads it when it starts.
"""

from __future__ import annotations

import time

from infra.bus import Bus, read_until
from infra.errors import Explained
from infra.gate import Gate, passed_over
from infra.runs import RunRecord
from schemas.messages import Owner
from schemas.topics import Topics
from schemas.wire import encode

_READ_S = 30.0
_LOOKED_AT = 100  # records, at most, in the search for the owner


class NotOurTopics(Explained):
    """The topics of a run belong to another run of the same id."""

    lasting = True


def claim(bus: Bus, record: RunRecord, topics: Topics) -> None:
    """Make this run the owner of topics without an owner. Raise NotOurTopics if another run owns them."""
    if topics_owner(bus, topics, record.id) is None and record.identity:
        mark = Owner(run=record.id, identity=record.identity, store=record.store, made_at=time.time())
        writer = bus.writer()
        try:
            writer.send(
                topics.owner, encode(mark), key=record.identity
            )  # one key for each run, so that compaction keeps the first record
            writer.flush(_READ_S)
        finally:
            writer.close()
    check_owner(bus, record, topics)


def check_owner(bus: Bus, record: RunRecord, topics: Topics) -> None:
    """Raise NotOurTopics if another run owns the topics. Topics without an owner are accepted."""
    owner = topics_owner(bus, topics, record.id)
    if owner is None or owner.identity == record.identity:
        return
    raise NotOurTopics(
        f"the topics {record.id}.* at Kafka {record.bootstrap_servers} are those of another run {record.id}, "
        f"in the store {owner.store}; this one is in {record.store}. Use another broker, start a new run "
        f"(without --resume) or remove that one: streamrl rm {record.id} --store {owner.store}"
    )


def topics_owner(bus: Bus, topics: Topics, run: str) -> Owner | None:
    """Return the run that claimed the topics first; None if none has."""
    reader = bus.reader(topics.owner)
    gate = Gate(Owner, run, passed_over)
    try:
        found = read_until(reader, reader.end_offsets(), topics.owner, deadline_s=_READ_S)
        for _, record in zip(range(_LOOKED_AT), found, strict=False):
            if owner := gate.take_one(record):
                return owner
    finally:
        reader.close()
    return None
