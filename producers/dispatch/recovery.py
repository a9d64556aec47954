"""What was done before this process started, as the log says."""

from __future__ import annotations

from dataclasses import dataclass

from infra.bus import Bus, read_all, read_until
from producers.jobs import Key
from schemas.messages import Sample, StepRecord
from schemas.topics import Topics
from schemas.wire import Unreadable, decode


@dataclass(frozen=True)
class Past:
    """Samples that are there, iterations that are trained, and where the samples' log was read up to."""

    done: set[Key]
    trained: int
    positions: dict[int, int]


def look_back(bus: Bus, topics: Topics, *, lookahead: float, deadline_s: float) -> Past:
    """Read the log's end.

    Samples of a window that is not trained yet come behind every sample of the windows that were trained
    before the first of them could be admitted: so only the log's end has to be read.
    """
    steps = [
        decode(record.value, StepRecord) for record in read_all(bus, topics.ledger, deadline_s=deadline_s)
    ]
    trained = max((step.iteration + 1 for step in steps if step.last_of_iteration), default=0)
    behind: dict[int, int] = {}
    for step in steps:
        if step.iteration < trained - lookahead - 1:
            for partition, offset in zip(step.partitions.tolist(), step.offsets.tolist(), strict=True):
                behind[partition] = max(behind.get(partition, 0), offset + 1)
    done: set[Key] = set()
    reader = bus.reader(topics.samples, behind)
    try:
        for record in read_until(reader, reader.end_offsets(), topics.samples, deadline_s=deadline_s):
            try:
                sample = decode(record.value, Sample)
            except Unreadable:
                continue  # the trainer reports it
            done.add((sample.group, sample.index))
        return Past(done, trained, reader.positions())
    finally:
        reader.close()
