"""The ledger as the feeder reads it: each step once, in order, and where everything stands.

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
    """The steps behind a position, one by one. A step that has come before does not come again."""

    def __init__(self, context: RoleContext, position: int = 0, number: int = 0) -> None:
        """`number`: the first step that counts."""
        self._context, self.number = context, number
        self._skipped = skipped(context.store, context.run)
        self._gate = Gate(
            StepRecord, context.run, self._refused, foreign=self._passed_over,
            unfit=lambda step: wrong_step(step, context.spec),
        )  # fmt: skip
        topic = context.topics.ledger
        self._reader = context.bus.reader(topic, {0: position})
        self.gone = sum(clamp(self._reader).values())  # records that retention has taken
        if self.gone:
            context.log.info(
                "%s begins at %d: the %d records before are gone (placement.kafka.retention_hours)",
                topic.name, position + self.gone, self.gone,
            )  # fmt: skip
        self.position = position + self.gone  # behind the last record that was taken
        self._records: deque[Record] = deque()

    def end(self) -> int:
        """The position behind the newest record."""
        return self._reader.end_offsets()[0]

    def next(self, wait_s: float) -> StepRecord | None:
        """The next step, if it comes in time."""
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
        """The steps before a position."""
        deadline_s = self._context.spec.deadlines.progress_s
        topic = self._context.topics.ledger.name
        wait = Wait(f"records of {topic}", unblocked_by="the Kafka broker", deadline_s=deadline_s)
        while self.position < end:
            before = self.position
            if (step := self.next(0.2)) is not None:
                yield step
            wait.progress() if self.position > before else wait.check()

    def close(self) -> None:
        """Let go of the reader."""
        self._reader.close()

    def _refused(self, record: Record, reason: str) -> None:
        """A record of this run, or an unreadable one: only what could be a step to come matters."""
        if not self.number <= claimed_step(record) < steps_in(self._context.spec):
            return self._passed_over(record, reason)
        raise bad_step(record, reason, self._context.run, self._context.store)

    def _passed_over(self, record: Record, reason: str) -> None:
        self._context.log.warning("%s is passed over: %s", record.place, reason)


class Beginnings:
    """Where the newest iterations begin in the ledger: from there a ranker learns what its state lacks."""

    def __init__(self, kept: int, known: Mapping[int, Began]) -> None:
        """`kept`: how many iterations."""
        self._kept, self.known = kept, dict(known)

    def take(self, step: StepRecord, position: int) -> None:
        """A step that counts, and the position behind it."""
        if step.iteration not in self.known:
            self.known[step.iteration] = Began(step=step.step, position=position - 1)
            for old in [one for one in self.known if one <= step.iteration - self._kept]:
                del self.known[old]

    def at(self, iteration: int) -> Began | None:
        """Where to read from for an iteration; if that is not known, for the next one that is."""
        return next((self.known[one] for one in sorted(self.known) if one >= iteration), None)


class Behind:
    """Where the samples' log has to be read from to find all samples of an iteration and of later ones.

    They come behind every sample of the iterations that were trained before the first of them was admitted.
    """

    def __init__(
        self,
        lookahead: float,
        settled: Positions | None = None,
        pending: Mapping[int, Positions] | None = None,
    ) -> None:
        self._lookahead = lookahead
        self.settled = dict(settled or {})
        self.pending = {iteration: dict(one) for iteration, one in (pending or {}).items()}

    def take(self, step: StepRecord) -> None:
        """A step that is trained."""
        if self._lookahead == float("inf"):
            return  # what it trained is of another run's log
        positions = self.pending.setdefault(step.iteration, {})
        for partition, offset in zip(step.partitions.tolist(), step.offsets.tolist(), strict=True):
            positions[partition] = max(positions.get(partition, 0), offset + 1)

    def at(self, iteration: int) -> Positions:
        """For an iteration; from now on nobody asks for an earlier one."""
        for old in [one for one in self.pending if one < iteration - self._lookahead - 1]:
            for partition, position in self.pending.pop(old).items():
                self.settled[partition] = max(self.settled.get(partition, 0), position)
        return dict(self.settled)
