"""What was done before this process started, as the log says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.bus import Bus, Record, read_until
from producers.jobs import Key
from schemas.messages import DeadLetter, Sample, StepRecord
from schemas.topics import Topic, Topics
from schemas.wire import Unreadable, decode

Place = tuple[int, int]  # partition and position in `<run>.samples`


@dataclass(frozen=True)
class Past:
    """Samples that are there, iterations that are trained, and where the samples' log was read up to."""

    done: dict[Key, int]  # with their lengths
    trained: int
    positions: dict[int, int]
    unfit: set[Place] = field(default_factory=set)  # samples that could not be used
    letters: int = 0  # where the dead letters were read up to


def unfit_sample(record: Record, samples: Topic) -> tuple[Place, str] | None:
    """Where a sample stands that could not be used; and its id, if it is to be made again."""
    try:
        letter = decode(record.value, DeadLetter)
    except Unreadable:
        return None
    return ((letter.partition, letter.offset), letter.wanted) if letter.topic == samples.name else None


def behind(steps: Sequence[StepRecord], iteration: int, lookahead: float) -> dict[int, int]:
    """Where the samples' log has to be read from to find all samples of an iteration and of later ones.

    They come behind every sample of the iterations that were trained before the first of them was admitted.
    """
    positions: dict[int, int] = {}
    for step in steps:
        if step.iteration < iteration - lookahead - 1:
            for partition, offset in zip(step.partitions.tolist(), step.offsets.tolist(), strict=True):
                positions[partition] = max(positions.get(partition, 0), offset + 1)
    return positions


def look_back(
    bus: Bus, topics: Topics, steps: Sequence[StepRecord], *, lookahead: float, deadline_s: float
) -> Past:
    """Read the log's end; `steps` is the ledger."""
    unfit, letters = _unfit(bus, topics, deadline_s)
    trained = max((step.iteration + 1 for step in steps if step.last_of_iteration), default=0)
    done: dict[Key, int] = {}
    reader = bus.reader(topics.samples, behind(steps, trained, lookahead))
    try:
        for record in read_until(reader, reader.end_offsets(), topics.samples, deadline_s=deadline_s):
            if (record.partition, record.offset) in unfit:
                continue
            try:
                sample = decode(record.value, Sample)
            except Unreadable:
                continue  # the trainer reports it
            done[sample.group, sample.index] = sample.true_length
        return Past(done, trained, reader.positions(), unfit, letters)
    finally:
        reader.close()


def _unfit(bus: Bus, topics: Topics, deadline_s: float) -> tuple[set[Place], int]:
    """The samples that could not be used, and where the dead letters end."""
    reader = bus.reader(topics.dead)
    try:
        records = list(read_until(reader, reader.end_offsets(), topics.dead, deadline_s=deadline_s))
        found = [unfit_sample(record, topics.samples) for record in records]
        return {one[0] for one in found if one is not None}, reader.positions()[0]
    finally:
        reader.close()
