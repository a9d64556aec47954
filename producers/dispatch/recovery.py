"""What was done before this process started, and what dead letters say of samples."""

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
    """Samples that are there, iterations that are trained, and samples that could not be used."""

    done: dict[SampleKey, int]  # with their lengths
    trained: int
    unfit: set[RecordPlace] = field(default_factory=set)
    letters: int = 0  # where the dead letters were read up to


@dataclass(frozen=True)
class UnfitSample:
    """Where a sample stands that could not be used; and its id, if it is to be made again."""

    place: RecordPlace
    wanted: str


class SampleDeadLetters:
    """Takes those that speak of samples out of the dead letters."""

    def __init__(self, context: RoleContext) -> None:
        self._samples = context.topics.samples.name
        self._gate = Gate(DeadLetter, context.run, passed_over)  # no letter about letters

    def take(self, records: Sequence[Record]) -> list[UnfitSample]:
        """What they say."""
        return [
            UnfitSample(RecordPlace(letter.partition, letter.offset), letter.wanted)
            for letter in self._gate.messages(records)
            if letter.topic == self._samples
        ]
