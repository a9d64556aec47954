"""The dispatcher's start: samples that were done before, and dead letters about samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.bus import Record
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext
from producers.dispatch.jobs import RecordPlace
from schemas.identity import SampleKey
from schemas.messages import DeadLetter


@dataclass(frozen=True)
class Past:
    """Samples that are done, iterations that are trained, and samples that could not be used."""

    done: dict[SampleKey, int]  # lengths of finished samples
    trained: int
    unfit: set[RecordPlace] = field(default_factory=set)
    letters: int = 0  # the position up to which dead letters were read


@dataclass(frozen=True)
class UnfitSample:
    """The place of a sample that could not be used, and its id if it is to be made again (else empty)."""

    place: RecordPlace
    wanted: str


class SampleDeadLetters:
    """Finds the dead letters that are about samples."""

    def __init__(self, context: RoleContext) -> None:
        self._samples = context.topics.samples.name
        self._gate = Gate(DeadLetter, context.run, passed_over)  # no letter about letters

    def take(self, records: Sequence[Record]) -> list[UnfitSample]:
        """Return the unfit samples among the records of `<run>.dead`."""
        return [
            UnfitSample(RecordPlace(letter.partition, letter.offset), letter.wanted)
            for letter in self._gate.messages(records)
            if letter.topic == self._samples
        ]
