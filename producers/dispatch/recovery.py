"""The dispatcher's start: samples that were done before, lengths that came of predictions, dead letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from infra.bus import Record, near_ends, read_all
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext
from producers.dispatch.beliefs import KEPT_PAIRS, Pair
from producers.dispatch.jobs import RecordPlace
from schemas.identity import SampleKey
from schemas.messages import DeadLetter, StepRecord

_READ_S = 60.0
_MOST_STEPS = 256


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


def lengths_before(context: RoleContext) -> list[list[Pair]]:
    """Return predicted and true lengths of the newest trained samples, by group, the oldest first.

    The ledger has both. Its end is read: as many steps as have enough samples.
    """
    algorithm, ledger = context.spec.algorithm, context.topics.ledger
    samples = algorithm.groups * algorithm.group_size / algorithm.optimizer_steps
    newest = min(math.ceil(KEPT_PAIRS / samples) + 1, _MOST_STEPS)
    records = read_all(context.bus, ledger, near_ends(context.bus, ledger, newest), deadline_s=_READ_S)
    steps = {
        step.step: step for step in reversed(Gate(StepRecord, context.run, passed_over).messages(records))
    }
    groups: dict[int, list[Pair]] = {}
    for _, step in sorted(steps.items()):
        rows = zip(step.groups.tolist(), step.predicted.tolist(), step.lengths.tolist(), strict=True)
        for group, predicted, length in rows:
            if math.isfinite(predicted):
                groups.setdefault(group, []).append((predicted, float(length)))
    return list(groups.values())
