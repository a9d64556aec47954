"""The feeder's view of the ledger: gives each step once and in order, and notes positions to restart from.

record ──► of this run, and readable? ──► newer than the last step? ──► counts
            └─ no: could it be the next step?  no ──► passed over (the trainer reports it)
                                              yes ──► the run stops, until `streamrl skip` names it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from infra.bad_step import bad_step, claimed_step
from infra.bus import Record, clamp
from infra.gate import Gate
from infra.roles.context import RoleContext
from infra.skipped import place_of, skipped
from infra.waiting import Wait
from producers.snapshots import Began, Positions
from schemas.messages import StepRecord
from schemas.steps import steps_in, wrong_step


class Steps:
    """Reads the ledger's steps one by one. Repeated records of a step are skipped."""

    def __init__(self, context: RoleContext, position: int = 0, number: int = 0) -> None:
        """`position`: where to read from. `number`: the first step to return."""
        self._context, self.number = context, number
        self._skipped = skipped(context.store, context.run)
        self._gate = Gate(
            StepRecord, context.run, self._refused, foreign=self._passed_over,
            unfit=lambda step: wrong_step(step, context.spec),
        )  # fmt: skip
        self.position, self._records = position, deque[Record]()

    def open(self) -> Steps:
        """Begin to read. Return itself."""
        context, position, topic = self._context, self.position, self._context.topics.ledger
        self._reader = context.bus.reader(topic, {0: position})
        self.gone = sum(clamp(self._reader).values())  # records that retention has removed
        if self.gone:
            context.log.info(
                "%s begins at %d: the %d records before it were removed",
                topic.name, position + self.gone, self.gone,
            )  # fmt: skip
        self.position = position + self.gone  # behind the last record that was read
        return self

    def end(self) -> int:
        """Return the position behind the newest record."""
        return self._reader.end_offsets()[0]

    def next(self, wait_s: float) -> StepRecord | None:
        """Return the next step, or None if none comes within `wait_s` seconds."""
        if not self._records:
            self._records += self._reader.poll(wait_s)
        while self._records:
            record = self._records.popleft()
            self.position = record.offset + 1
            if place_of(record) in self._skipped:
                continue
            step = self._gate.take_one(record)
            if step is not None and step.step >= self.number:
                self.number = step.step + 1
                return step
        return None

    def up_to(self, end: int) -> Iterator[StepRecord]:
        """Yield the steps before position `end`, waiting for each."""
        deadline_s = self._context.spec.deadlines.progress_s
        topic = self._context.topics.ledger.name
        wait = Wait(f"records of {topic}", unblocked_by="the Kafka broker", deadline_s=deadline_s)
        while self.position < end:
            before = self.position
            if (step := self.next(0.2)) is not None:
                yield step
            wait.progress() if self.position > before else wait.check()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def _refused(self, record: Record, reason: str) -> None:
        """Skip a refused record, unless it may be a step that is still to come: then raise."""
        if not self.number <= claimed_step(record) < steps_in(self._context.spec):
            return self._passed_over(record, reason)
        raise bad_step(record, reason, self._context.run, self._context.store)

    def _passed_over(self, record: Record, reason: str) -> None:
        self._context.log.warning("%s is passed over: %s", record.place, reason)


class Beginnings:
    """Notes where the newest iterations begin in the ledger: a ranker learns on from there."""

    def __init__(self, kept: int, known: Mapping[int, Began]) -> None:
        """`kept`: how many iterations to note."""
        self._kept, self.known = kept, dict(known)

    def take(self, step: StepRecord, position: int) -> None:
        """Note a step; `position` is behind its record."""
        if step.iteration not in self.known:
            self.known[step.iteration] = Began(step=step.step, position=position - 1)
            for old in [one for one in self.known if one <= step.iteration - self._kept]:
                del self.known[old]

    def at(self, iteration: int) -> Began | None:
        """Return where an iteration begins, or the next one that is known. None if there is none."""
        return next((self.known[one] for one in sorted(self.known) if one >= iteration), None)


class Behind:
    """Computes where to read `<run>.samples` from to find all samples of an iteration and of later ones.

    These come after every sample of the iterations that were trained before the iteration was admitted.
    """

    def __init__(
        self,
        most_stale: float,
        settled: Positions | None = None,
        pending: Mapping[int, Positions] | None = None,
    ) -> None:
        self._most_stale = most_stale
        self.settled = dict(settled or {})
        self.pending = {iteration: dict(one) for iteration, one in (pending or {}).items()}

    def take(self, step: StepRecord) -> None:
        """Note the positions of a trained step's samples."""
        if self._most_stale == float("inf"):
            return  # an offline step: its samples are on another run's log
        positions = self.pending.setdefault(step.iteration, {})
        for partition, offset in zip(step.partitions.tolist(), step.offsets.tolist(), strict=True):
            positions[partition] = max(positions.get(partition, 0), offset + 1)

    def at(self, iteration: int) -> Positions:
        """Return the positions for an iteration. Later calls must not ask for an earlier one."""
        for old in [one for one in self.pending if one < iteration - self._most_stale - 1]:
            for partition, position in self.pending.pop(old).items():
                self.settled[partition] = max(self.settled.get(partition, 0), position)
        return dict(self.settled)
