"""The ledger: one trainer at a time appends to it, and the first record of each step counts.

A trainer that was thought dead may still append. Before each record it looks whether a newer start has
replaced it (`infra.epochs`). A record that it wrote in between is a step like any other, and the newer
trainer takes that step as it stands. If a trainer finds that its own record of a step is not the first one,
and that the first one led to other weights, it must stop: nobody would take its step again.

    record ──► of this run, and readable? ──► first of its step? ──► counts
                └─ no: could it be a step that is needed?  no ──► a dead letter
                                                          yes ──► the run stops: `streamrl skip`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infra.bad_step import bad_step, claimed_step
from infra.bus import Reader, Record, clamp, ends_of, read_until
from infra.errors import Explained
from infra.gate import Gate, Refuse
from infra.roles.context import RoleContext
from infra.run_handle import RunHandle
from infra.skipped import place_of, skipped
from infra.waiting import Wait
from schemas.messages import StepRecord
from schemas.runspec import RunSpec
from schemas.steps import steps_in, wrong_step
from schemas.topics import Topics
from schemas.wire import encode

_TAIL = 64  # records at the ledger's end that are searched first for the newest step
_BACK = 256  # records to look through before a position, if a step is missing behind it


class AnotherTrainer(Explained):
    """Two trainers are at work on one run; the message says which one may go on."""


class Ledger:
    """A run's steps: a trainer reads them when it starts, and appends to them from then on."""

    def __init__(
        self, context: RoleContext, trainer_epoch: int, fence: Callable[[], None] = lambda: None
    ) -> None:
        """`fence` raises if this trainer must not write any more."""
        self._context, self._epoch, self._fence = context, trainer_epoch, fence
        self._deadline = context.spec.deadlines.progress_s
        self._skipped = skipped(context.store, context.run)
        self._gate = Gate(
            StepRecord, context.run, self._refused, foreign=self._passed_over,
            unfit=lambda step: wrong_step(step, context.spec),
        )  # fmt: skip
        self._needed = 0  # steps before this one are done: bad records of them do not matter
        self._first: dict[int, tuple[int, StepRecord]] = {}  # by step: its position and its first record
        self._reader: Reader | None = None
        self.end = 0  # position behind the newest record that was read

    def rest(self, position: int, number: int = 0) -> list[StepRecord]:
        """Return the steps from `number` on, each once, in order; read from `position` on.

        No first record of these steps should be before `position`. If step `number` is missing all the same,
        it is looked for further back.
        """
        topic, back = self._context.topics.ledger, _BACK
        while True:
            self._needed, self._first, self.end = number, {}, position
            reader = self._context.bus.reader(topic, {0: position})
            self._reader, gone = reader, clamp(reader)
            self.end += sum(gone.values())
            for record in read_until(reader, reader.end_offsets(), topic, deadline_s=self._deadline):
                self._take(record)
            if number in self._first or not self._first or gone or position == 0:
                return [step for _, (_, step) in sorted(self._first.items())]
            reader.close()
            position, back = max(0, position - back), back * 4

    def read_on(self, number: int) -> list[StepRecord]:
        """Read to the log's current end; return the steps from `number` on, each once, in order."""
        assert self._reader is not None, "rest() must be called first"
        topic, ends = self._context.topics.ledger, self._reader.end_offsets()
        self._forget(number)
        for record in read_until(self._reader, ends, topic, deadline_s=self._deadline):
            self._take(record)
        return [step for _, (_, step) in sorted(self._first.items())]

    def append(self, step: StepRecord) -> None:
        """Append a step and wait until its record is in the log and counts.

        Raises AnotherTrainer if another record counts that led to other weights, or a newer start has a step.
        """
        assert self._reader is not None, "rest() must be called first"
        self._fence()
        writer, topic = self._context.writer, self._context.topics.ledger
        writer.send(topic, encode(step), key=str(step.step))
        writer.flush(self._deadline)
        wait = Wait(f"step {step.step} in {topic.name}", unblocked_by="the Kafka broker",
                    deadline_s=self._deadline)  # fmt: skip
        while True:
            records = self._reader.poll(0.2)
            mine = False
            for record in records:
                found = self._taken_by_none_newer(record)
                mine |= found is not None and (found.step, found.trainer_epoch) == (step.step, self._epoch)
            if mine:
                return self._check(self._first[step.step][1], step)
            wait.progress() if records else wait.check()

    def standing(self, number: int) -> StepRecord | None:
        """Return step `number` if another trainer has taken it already, else None. Forgets earlier steps."""
        assert self._reader is not None, "rest() must be called first"
        self._forget(number)
        for record in self._reader.poll(0.0):
            self._taken_by_none_newer(record)
        return self._first[number][1] if number in self._first else None

    def _forget(self, number: int) -> None:
        """Forget the steps before `number`, which are done."""
        self._needed = number
        self._first = {one: found for one, found in self._first.items() if one >= number}

    def position(self, number: int) -> int:
        """Return a position to read from: no first record of a step from `number` on is before it."""
        return min((at for one, (at, _) in self._first.items() if one >= number), default=self.end)

    def place(self, number: int) -> str:
        """Return where the record of a step stands, for people."""
        topic = self._context.topics.ledger
        return Record(topic.name, 0, self._first[number][0], b"", b"").place

    def _check(self, first: StepRecord, mine: StepRecord) -> None:
        same_groups = set(first.groups.tolist()) == set(mine.groups.tolist())
        if first.root_out != mine.root_out or not same_groups:  # steps without a gradient have equal weights
            raise AnotherTrainer(
                f"another trainer took step {mine.step} before this one (start {first.trainer_epoch}; "
                f"this is start {self._epoch}), and came to other weights or took other groups. End the "
                "other trainer: this one, started again, goes on behind that step"
            )

    def _taken_by_none_newer(self, record: Record) -> StepRecord | None:
        found = self._take(record)
        if found is not None and found.trainer_epoch > self._epoch:
            self._fence()  # this error says more
            raise AnotherTrainer(
                f"step {found.step} was taken by a newer start of the trainer "
                f"({found.trainer_epoch}; this is start {self._epoch}): this trainer was replaced, and ends"
            )
        return found

    def _take(self, record: Record) -> StepRecord | None:
        self.end = record.offset + 1
        if place_of(record) in self._skipped:
            return None
        step = self._gate.take_one(record)
        if step is not None and step.step >= self._needed:
            self._first.setdefault(step.step, (record.offset, step))
        return step

    def _refused(self, record: Record, reason: str) -> None:
        """Pass over a bad record, or stop the run if it could be a step that counts."""
        number = claimed_step(record)
        if number < self._needed or number in self._first or number >= steps_in(self._context.spec):
            return self._passed_over(record, reason)
        raise bad_step(record, reason, self._context.run, self._context.store)

    def _passed_over(self, record: Record, reason: str) -> None:
        self._context.dead_letter(record, reason)

    def close(self) -> None:
        """Close the reader."""
        if self._reader is not None:
            self._reader.close()


def steps_in_ledger(handle: RunHandle, start: int = 0) -> Iterator[StepRecord]:
    """Yield the steps that this run's ledger still has from position `start` on, each once, in order."""
    return (step for _, step in steps_in_log(handle, handle.run, handle.spec, start))


def newest_in_ledger(handle: RunHandle) -> int | None:
    """Return the number of the ledger's newest step; None if it has none."""
    end = ends_of(handle.bus, handle.topics.ledger)[0]
    back = _TAIL
    while True:
        found = [step.step for step in steps_in_ledger(handle, max(0, end - back))]
        if found or back >= end:
            return found[-1] if found else None
        back *= 8


def steps_in_log(
    handle: RunHandle, run: str, spec: RunSpec, start: int
) -> Iterator[tuple[Record, StepRecord]]:
    """Yield steps of any run's ledger with their records, from position `start` on, each once, in order.

    A trainer appends a step when all before it stand. So the first record of a step comes after those of
    earlier steps, and no record has to be kept in memory. Records that can't be used are passed over: if one
    was a step, the caller misses it.
    """
    refuse: Refuse = lambda record, reason: handle.log.warning(  # noqa: E731
        "%s is passed over: %s", record.place, reason
    )
    gate = Gate(StepRecord, run, refuse, unfit=lambda step: wrong_step(step, spec))
    topic, places, number = Topics(run, spec.lengths.classes).ledger, skipped(handle.store, run), -1
    reader = handle.bus.reader(topic, {0: start})
    try:
        clamp(reader)
        ends, deadline_s = reader.end_offsets(), handle.spec.deadlines.progress_s
        for record in read_until(reader, ends, topic, deadline_s=deadline_s):
            if place_of(record) in places or (step := gate.take_one(record)) is None:
                continue
            if step.step > number:
                number = step.step
                yield record, step
    finally:
        reader.close()
