"""Lets a run go on past a record at which it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flows.run.request import RunFailed
from infra.bus import Bus, Record, read_until
from infra.gate import Gate
from infra.run_bus import connect
from infra.runs import RunRecord, find
from infra.skipped import SkippedPlace, add_skipped, place_of, skipped
from infra.stores.store import Store
from schemas.messages import (
    Assignment,
    DeadLetter,
    Evaluation,
    GeneratorReport,
    Heartbeat,
    Part,
    Prompt,
    RankerAnnouncement,
    Sample,
    SiteReport,
    StepRecord,
    WeightsAnnouncement,
)
from schemas.steps import wrong_step
from schemas.topics import Topic, Topics
from schemas.wire import Message

_READ_S = 30.0
_KINDS: dict[str, tuple[type[Message], ...]] = {
    "prompts": (Prompt,), "assignments": (Assignment,), "parts": (Part,), "instances": (GeneratorReport,),
    "samples": (Sample,), "ledger": (StepRecord,), "weights": (WeightsAnnouncement, SiteReport),
    "ranker": (RankerAnnouncement,), "evals": (Evaluation,), "dead": (DeadLetter,), "status": (Heartbeat,),
}  # fmt: skip


@dataclass(frozen=True)
class Skipped:
    """The decision to go on past a record."""

    place: str
    size: int  # of the record, in bytes
    why: str  # why it can't be used; empty: it can
    new: bool  # False: it was on the list already


def skipping(store: Store, run: str, place: SkippedPlace, *, force: bool) -> Skipped:
    """Put a record on the list of those that a run goes on past.

    Raises RunFailed if the record is not there or, without `force`, if it can be used.
    """
    record = find(store, run)
    bus = connect(record, "streamrl-skip")
    try:
        return decided(store, bus, record, place, force=force)
    finally:
        bus.close()


def decided(store: Store, bus: Bus, run: RunRecord, place: SkippedPlace, *, force: bool) -> Skipped:
    """Like `skipping`, with an open bus and the run's record."""
    topic = _topic(run, place[0])
    found = _record(bus, topic, place)
    why = _why_not(run, topic, found)
    if not why and not force:
        raise RunFailed(
            f"{found.place} can be read, and is of run {run.id}: a run that goes on past it does not know "
            "what it says. To give it up all the same, add --force"
        )
    new = place not in skipped(store, run.id)
    add_skipped(store, run.id, place, why or "it can be used, and somebody gave it up")
    return Skipped(found.place, len(found.value), why, new)


def _why_not(run: RunRecord, topic: Topic, record: Record) -> str:
    """Return why a record can't be used; empty if it can."""
    reasons: list[str] = []
    for kind in _KINDS[topic.name.rpartition(".")[2]]:
        unfit: Callable[[Any], str] = (
            (lambda step: wrong_step(step, run.spec)) if kind is StepRecord else lambda message: ""
        )
        gate = Gate(kind, run.id, lambda _, reason: reasons.append(reason), unfit=unfit)
        if gate.take_one(record) is not None:
            return ""
    return reasons[0]


def _topic(run: RunRecord, name: str) -> Topic:
    topics = {topic.name: topic for topic in Topics(run.id, run.spec.lengths.classes).all()}
    if name not in topics:
        raise RunFailed(f"run {run.id} has no topic {name}; it has {', '.join(topics)}")
    return topics[name]


def _record(bus: Bus, topic: Topic, place: SkippedPlace) -> Record:
    _, partition, offset = place
    if partition >= topic.partitions:
        raise RunFailed(
            f"{topic.name} has no partition {partition}; it has {topic.partitions}, counted from 0"
        )
    reader = bus.reader(topic, only=partition)
    try:
        begin, end = reader.begin_offsets()[partition], reader.end_offsets()[partition]
        if begin <= offset < end:
            reader.seek({partition: offset})
            for record in read_until(reader, {partition: offset + 1}, topic, deadline_s=_READ_S):
                if place_of(record) == place:
                    return record
                break
    finally:
        reader.close()
    kept = f"the partition goes from {begin} to {end - 1}" if end > begin else "the partition is empty"
    raise RunFailed(f"{topic.name}[{partition}] has no record {offset}: {kept}")
