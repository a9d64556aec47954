"""What was done before this process started, as the log says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.bus import Bus, read_until
from producers.jobs import Key
from schemas.messages import Sample, StepRecord
from schemas.topics import Topics
from schemas.wire import Unreadable, decode


@dataclass(frozen=True)
class Past:
    """Samples that are there, iterations that are trained, and where the samples' log was read up to."""

    done: dict[Key, int]  # with their lengths
    trained: int
    positions: dict[int, int]


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
    trained = max((step.iteration + 1 for step in steps if step.last_of_iteration), default=0)
    done: dict[Key, int] = {}
    reader = bus.reader(topics.samples, behind(steps, trained, lookahead))
    try:
        for record in read_until(reader, reader.end_offsets(), topics.samples, deadline_s=deadline_s):
            try:
                sample = decode(record.value, Sample)
            except Unreadable:
                continue  # the trainer reports it
            done[sample.group, sample.index] = sample.true_length
        return Past(done, trained, reader.positions())
    finally:
        reader.close()
