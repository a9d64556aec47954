"""What was done before this process started, as the log says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra.bus import Record, read_until
from infra.gate import Gate, passed_over
from infra.process import Context
from producers.jobs import Key, Place
from schemas.fitness import fault, weights_fault
from schemas.messages import TRAIN, DeadLetter, Sample, StepRecord
from schemas.runspec import RunSpec


@dataclass(frozen=True)
class Past:
    """Samples that are there, iterations that are trained, and where the samples' log was read up to."""

    done: dict[Key, int]  # with their lengths
    trained: int
    positions: dict[int, int]
    unfit: set[Place] = field(default_factory=set)  # samples that could not be used
    letters: int = 0  # where the dead letters were read up to


@dataclass(frozen=True)
class UnfitSample:
    """Where a sample stands that could not be used; and its id, if it is to be made again."""

    place: Place
    wanted: str


class Letters:
    """Takes those that speak of samples out of the dead letters."""

    def __init__(self, context: Context) -> None:
        self._samples = context.topics.samples.name
        self._gate = Gate(DeadLetter, context.run, passed_over)  # no letter about letters

    def take(self, records: Sequence[Record]) -> list[UnfitSample]:
        """What they say."""
        return [
            UnfitSample(Place(letter.partition, letter.offset), letter.wanted)
            for letter in self._gate.messages(records)
            if letter.topic == self._samples
        ]


def fit_samples(context: Context) -> Gate[Sample]:
    """Lets a sample pass that fits the run, as far as it can be seen. What does not, the trainer reports."""
    return Gate(Sample, context.run, passed_over, unfit=lambda sample: _unfit(sample, context.spec))


def _unfit(sample: Sample, spec: RunSpec) -> str:
    if sample.purpose != TRAIN:
        return ""
    newest = spec.algorithm.iterations  # which one is there the trainer knows, and which root it has
    claimed = dict(zip(sample.versions.tolist(), sample.roots, strict=True))
    return fault(sample, spec) or weights_fault(sample, spec, newest, claimed.get)


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


def look_back(context: Context, steps: Sequence[StepRecord], *, letters: int = 0) -> Past:
    """Read the log's end; `steps` is the ledger, `letters` from where on the dead letters may matter."""
    lookahead = context.spec.algorithm.lookahead
    trained = max((step.iteration + 1 for step in steps if step.last_of_iteration), default=0)
    start = behind(steps, trained, lookahead)
    unfit, letters = _unfit_places(context, start, letters)
    done: dict[Key, int] = {}
    topic, gate = context.topics.samples, fit_samples(context)
    reader = context.bus.reader(topic, start)
    try:
        records = read_until(reader, reader.end_offsets(), topic, deadline_s=_deadline(context))
        for record, sample in gate.take(records):
            if Place(record.partition, record.offset) not in unfit:
                done[sample.group, sample.index] = sample.true_length
        return Past(done, trained, reader.positions(), unfit, letters)
    finally:
        reader.close()


def _unfit_places(context: Context, start: Mapping[int, int], letters: int) -> tuple[set[Place], int]:
    """The samples from `start` on that could not be used, and where the dead letters end."""
    topic, found = context.topics.dead, Letters(context)
    reader = context.bus.reader(topic, {0: letters})
    try:
        records = read_until(reader, reader.end_offsets(), topic, deadline_s=_deadline(context))
        places = (one.place for record in records for one in found.take([record]))
        unfit = {place for place in places if place.offset >= start.get(place.partition, 0)}
        return unfit, reader.positions()[0]
    finally:
        reader.close()


def _deadline(context: Context) -> float:
    return context.spec.deadlines.progress_s
