"""The ledger: appended to by one trainer at a time, and of each step the first record counts.

A trainer that was thought dead may still append. Whoever finds that a step of its own is not the first one,
and that the first one led to other weights, must not go on: nobody would take its step again.
"""

from __future__ import annotations

from collections.abc import Iterator

from infra.bus import BusError, Reader, Record, read_until
from infra.errors import Explained
from infra.process import Context
from infra.waiting import Wait
from schemas.messages import StepRecord
from schemas.wire import Unreadable, decode, encode


class AnotherTrainer(Explained):
    """Two trainers are at work on one run; the message says which one may go on."""


class Ledger:
    """A run's steps, as a trainer reads them when it starts and writes them from then on."""

    def __init__(self, context: Context, trainer_epoch: int) -> None:
        self._context, self._epoch = context, trainer_epoch
        self._deadline = context.spec.deadlines.progress_s
        self._first: dict[int, StepRecord] = {}  # of each step that may still be appended twice
        self._reader: Reader | None = None
        self.end = 0  # position behind the newest record that is known

    def rest(self, position: int) -> Iterator[StepRecord]:
        """The steps behind a position, each once, in order."""
        self._reader = reader = self._context.bus.reader(self._context.topics.ledger, {0: position})
        self.end = position
        topic = self._context.topics.ledger
        for record in read_until(reader, reader.end_offsets(), topic, deadline_s=self._deadline):
            step = self._take(record)
            if self._first.setdefault(step.step, step) is step:
                yield step

    def append(self, step: StepRecord) -> None:
        """Write a step. Returns when it stands, and counts."""
        assert self._reader is not None, "what is there is read first"
        writer, topic = self._context.writer, self._context.topics.ledger
        writer.send(topic, encode(step), key=str(step.step))
        writer.flush(self._deadline)
        wait = Wait(f"step {step.step} in {topic.name}", unblocked_by="the Kafka broker",
                    deadline_s=self._deadline)  # fmt: skip
        while True:
            records = self._reader.poll(0.2)
            for record in records:
                found = self._take(record)
                first = self._first.setdefault(found.step, found)
                if found.trainer_epoch > self._epoch:
                    raise AnotherTrainer(
                        f"step {found.step} was taken by a newer start of the trainer "
                        f"({found.trainer_epoch}; this is {self._epoch}): this one was thought dead, and ends"
                    )
                if found.step == step.step and found.trainer_epoch == self._epoch:
                    self._first = {number: one for number, one in self._first.items() if number >= step.step}
                    return self._check(first, step)
            wait.progress() if records else wait.check()

    def _check(self, first: StepRecord, mine: StepRecord) -> None:
        if first.root_out != mine.root_out:
            raise AnotherTrainer(
                f"step {mine.step} was also taken by another trainer, before this one and otherwise: end it "
                f"(start {first.trainer_epoch} of the trainer; this is {self._epoch}). Started again, this "
                "one goes on behind the other's step"
            )

    def _take(self, record: Record) -> StepRecord:
        self.end = record.offset + 1
        return read_step(record)

    def close(self) -> None:
        """Let go of the reader."""
        if self._reader is not None:
            self._reader.close()


def steps_of(context: Context) -> list[StepRecord]:
    """All steps that the ledger still has, each once, in order."""
    topic, found = context.topics.ledger, dict[int, StepRecord]()
    reader = context.bus.reader(topic)
    try:
        deadline_s = context.spec.deadlines.progress_s
        for record in read_until(reader, reader.end_offsets(), topic, deadline_s=deadline_s):
            step = read_step(record)
            found.setdefault(step.step, step)
    finally:
        reader.close()
    return [found[number] for number in sorted(found)]


def read_step(record: Record) -> StepRecord:
    """A record of the ledger. The run can't go on without one: nothing but a trainer may write there."""
    try:
        return decode(record.value, StepRecord)
    except Unreadable as error:
        raise BusError(f"{record.topic}[{record.partition}]@{record.offset}: {error}") from error
