"""The sample stream: records in, complete bundles out; each sample once, and none that is unfit for training.

    <run>.samples ──► readable? this run's? sound? new? ──► groups ──► bundles whose groups are all complete
                          └─ no: <run>.dead, with the reason

The trainer keeps positions itself: `low_watermarks` is where it must start to read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from consumers.batches.log_places import LogPlace
from consumers.batches.training_rows import TrainingRow, says_nothing
from consumers.stream.admitted import Admitted
from consumers.stream.unfit import Unfit
from infra.bus import Record, clamp
from infra.gate import Gate
from infra.roles.context import RoleContext
from infra.route_shapes import followed_shape
from infra.tail import Tail
from schemas.fitness import contradiction, fault, weights_fault
from schemas.identity import round_of
from schemas.messages import EVAL, TRAIN, Prompt, Sample
from schemas.wire import encode

StepKey = tuple[int, int]  # iteration and optimizer step in it
CAME_BEFORE = "came before, and the first one counts"
RootOf = Callable[[int], str | None]  # of a version; None if it is not known


@dataclass
class Bundle:
    """Groups whose samples form micro-batches together."""

    number: int
    groups: int
    rows: dict[int, dict[int, TrainingRow]] = field(default_factory=dict)  # by group, by index

    @property
    def complete(self) -> bool:
        """Whether all samples of all groups are here."""
        return len(self.rows) == self.groups and all(
            len(rows) == next(iter(rows.values())).sample.size for rows in self.rows.values()
        )

    def settled(self, resample: int) -> int:
        """Return how many of its groups are final: no other group will be drawn in their place."""
        return sum(
            round_of(group) >= resample or not says_nothing(row.sample for row in rows.values())
            for group, rows in self.rows.items()
        )

    def in_order(self) -> list[TrainingRow]:
        """Return all rows, in order of group and index."""
        return [self.rows[group][index] for group in sorted(self.rows) for index in sorted(self.rows[group])]


class Stream(Protocol):
    """The source of the groups that a trainer's steps train."""

    duplicates: int

    def pump(self, wait_s: float) -> int:
        """Take records that have come, or come within `wait_s` seconds; return how many were new."""

    def complete(self, key: StepKey) -> list[Bundle]:
        """Return the complete bundles of an optimizer step that are here now."""

    def groups(self, key: StepKey) -> Iterator[list[TrainingRow]]:
        """Yield the rows of each group of an optimizer step, as far as they are here."""

    def outstanding(self, key: StepKey) -> int:
        """Return how many samples of an optimizer step are not here yet."""

    def trained(self, key: StepKey) -> None:
        """Let go of the samples of an optimizer step that is done."""

    def low_watermarks(self) -> dict[int, int]:
        """Return by partition the position to read from after a restart: all samples before it are done."""

    def letters(self, marks: Mapping[int, int]) -> int | None:
        """Return a position in the dead letters; those before it are only about samples before `marks`.

        None: the stream writes no dead letters.
        """

    def close(self) -> None:
        """Close the readers."""


class SampleStream:
    """Reads `<run>.samples` and keeps the samples that are not trained yet."""

    def __init__(
        self, context: RoleContext, vocabulary: int, start: Mapping[int, int], trained: StepKey,
        root_of: RootOf, *, fence: Callable[[], None] = lambda: None, letters: int | None = 0,
    ) -> None:  # fmt: skip
        """`fence` raises if a newer trainer is at work. `letters`: see Unfit."""
        self._context, self._vocabulary, self._root_of, self._fence = context, vocabulary, root_of, fence
        self._route_shape = followed_shape(context.record.model, context.spec)
        self._trained = trained  # everything before this key is trained
        self._open = int(context.spec.algorithm.most_stale) + 1  # iterations in work
        self._start, self._first_letter = start, letters
        self._admitted = Admitted(context)
        self._bell = threading.Event()
        self._bundles: dict[StepKey, dict[int, Bundle]] = {}
        self._rows: dict[int, dict[int, TrainingRow]] = {}  # the rows of all bundles, by group
        self._finished: set[int] = set()  # groups of the iteration in work that are trained
        self._early: dict[LogPlace, tuple[Record, Sample]] = {}  # of weights that only another trainer has
        self._resample = context.spec.loss.most_draws
        self.duplicates = 0
        self.received = 0

    def open(self) -> SampleStream:
        """Begin to read, in a thread. Return itself."""
        context = self._context
        reader = context.bus.reader(context.topics.samples, self._start, patient=True)
        if gone := clamp(reader):
            context.log.warning(
                "%d records of %s that were not read yet are gone (placement.kafka.retention_hours): those "
                "that are needed must be made again", sum(gone.values()), context.topics.samples.name,
            )  # fmt: skip
        self._next = reader.positions()
        self._unfit = Unfit(context, self._is_missing, self._next, self._first_letter).open()
        self._gate = Gate(
            Sample, context.run, self._unfit.put, unfit=self._wrong,
            foreign=lambda record, reason: self._unfit.put(record, reason, ours=False),
        )  # fmt: skip
        self._tail = Tail(reader, lambda records: records, self._bell).open()
        return self

    def pump(self, wait_s: float) -> int:
        """Take records that have come, or come within `wait_s` seconds; return how many samples were new."""
        before = self.received
        if wait_s:
            self._bell.wait(wait_s)
            self._bell.clear()
        for record in self._tail.take():
            self._next[record.partition] = record.offset + 1
            sample = self._gate.take_one(record)
            if sample is not None and sample.purpose == TRAIN:
                self._take(sample, record)
        return self.received - before

    def _wrong(self, sample: Sample) -> str:
        if sample.purpose == TRAIN:
            return fault(sample, self._context.spec, self._vocabulary, self._route_shape)
        return "" if sample.purpose == EVAL else f"its purpose is {sample.purpose[:64]!r}"

    def _take(self, sample: Sample, record: Record) -> None:
        if self._is_trained(sample):
            self.duplicates += 1
            return
        if self._is_early(sample, record):
            return
        reason = weights_fault(sample, self._context.spec, self._trained[0], self._root_of)
        if reason := reason or self._contradiction(sample):
            self._unfit.put(record, reason)
            return
        bundle = self._bundles.setdefault((sample.iteration, sample.mini), {}).setdefault(
            sample.bundle, Bundle(sample.bundle, sample.bundle_groups)
        )
        rows = bundle.rows.setdefault(sample.group, {})
        self._rows[sample.group] = rows
        known = rows.get(sample.index)
        if known is None:
            rows[sample.index] = TrainingRow(sample, record.partition, record.offset)
            self.received += 1
            self._grew(bundle)
        elif sample.seed == known.sample.seed and not np.array_equal(known.sample.tokens, sample.tokens):
            self._unfit.put(record, f"sample {sample.id} came before with other tokens and the same seed")
        else:  # the same sample, or made again with newer weights
            self.duplicates += 1
            why = "a generator died behind its last write"
            self._unfit.put(record, f"sample {sample.id} {CAME_BEFORE}: {why}")

    def _is_trained(self, sample: Sample) -> bool:
        """Return whether a sample's group is trained. In the iteration in work its number does not say so."""
        if (sample.iteration, sample.mini) >= self._trained:
            return False
        if sample.iteration == self._trained[0]:
            self._finished.add(sample.group)
        return True

    def _grew(self, bundle: Bundle) -> None:
        """Called when a bundle has got a sample."""

    def _is_early(self, sample: Sample, record: Record) -> bool:
        """Return whether a sample is of weights of this run that this trainer has not come to.

        If so, another trainer has gone on. If it is a newer one, `fence` raises and this one ends. If it is
        an older one, the ledger has its steps, and the sample is held until they are taken.
        """
        last = int(sample.versions[-1])
        if last <= self._trained[0] or weights_fault(sample, self._context.spec, last, self._root_of):
            return False
        self._fence()
        algorithm = self._context.spec.algorithm
        if len(self._early) >= algorithm.groups * algorithm.group_size * 2 * (self._open + 1):
            return False
        self._early[record.partition, record.offset] = record, sample
        return True

    def _contradiction(self, sample: Sample) -> str:
        """Return why a sample does not go with those that are here; empty if it does.

        The admitted prompts say which are right: samples here that differ from them are dropped.
        """
        rows = self._rows.get(sample.group)
        reason = contradiction(sample, next(iter(rows.values())).sample) if rows else ""
        suspects = {sample.group}
        if not reason and (reason := self._of_bundle(sample)):
            suspects |= set(self._bundles[sample.iteration, sample.mini][sample.bundle].rows)
        if not reason:
            return ""
        prompts = self._admitted.groups(suspects, self._trained[0])
        for group in suspects & set(prompts) & set(self._rows):
            self._evict(group, prompts[group])
        if left := self._of_bundle(sample):
            return left
        rows = self._rows.get(sample.group)  # a whole group stays, whatever it is
        if rows and (left := contradiction(sample, next(iter(rows.values())).sample)):
            return left
        return contradiction(sample, prompts[sample.group]) if sample.group in prompts else reason

    def _of_bundle(self, sample: Sample) -> str:
        """Return why a sample does not go with the others of its bundle; empty if it does."""
        bundle = self._bundles.get((sample.iteration, sample.mini), {}).get(sample.bundle)
        if bundle is None:
            return ""
        if bundle.groups != sample.bundle_groups:
            return f"its bundle has {sample.bundle_groups} groups, but {bundle.groups} in samples before it"
        if sample.group not in bundle.rows and len(bundle.rows) == bundle.groups:
            return f"its bundle has all its groups without group {sample.group}"
        return ""

    def _evict(self, group: int, prompt: Prompt) -> None:
        """Drop a group's samples if they are not as admitted. A whole group stays: it may be in training."""
        rows = self._rows[group]
        some = next(iter(rows.values())).sample
        reason = contradiction(some, prompt)  # they all say the same, or they would not be here
        if not reason or len(rows) == some.size:
            return
        key, topic = (some.iteration, some.mini), self._context.topics.samples.name
        del self._rows[group]
        bundle = self._bundles[key][some.bundle]
        del bundle.rows[group]
        if not bundle.rows:
            del self._bundles[key][some.bundle]
        for row in rows.values():
            name = row.sample.id.encode()
            self._unfit.put(Record(topic, row.partition, row.offset, name, encode(row.sample)), reason)

    def _is_missing(self, group: int, index: int, iteration: int) -> bool:
        """Return whether a sample is not here and still needed."""
        there = self._is_finished(group) or index in self._rows.get(group, {})
        return self._trained[0] <= iteration <= self._trained[0] + self._open and not there

    def _is_finished(self, group: int) -> bool:
        """Return whether a group that the iteration in work, or a later one, might train is trained."""
        return group in self._finished

    @property
    def positions(self) -> dict[int, int]:
        """By partition the position behind the last record taken."""
        return dict(self._next)

    def complete(self, key: StepKey) -> list[Bundle]:
        """Return the complete bundles of an optimizer step that are here now."""
        bundles = self._bundles.get(key, {})
        ready = [bundle for bundle in bundles.values() if bundle.complete]
        return sorted(ready, key=lambda bundle: bundle.number)

    def groups(self, key: StepKey) -> Iterator[list[TrainingRow]]:
        """Yield the rows of each group of an optimizer step, as far as they are here."""
        for bundle in self._bundles.get(key, {}).values():
            for rows in bundle.rows.values():
                yield [rows[index] for index in sorted(rows)]

    def outstanding(self, key: StepKey) -> int:
        """Return how many samples of an optimizer step are not here yet."""
        algorithm = self._context.spec.algorithm
        wanted = algorithm.groups // algorithm.optimizer_steps * algorithm.group_size
        for bundle in self._bundles.get(key, {}).values():
            wanted -= sum(len(rows) for rows in bundle.rows.values())
            if self._resample and bundle.complete:  # other groups replace those that tell nothing
                wanted += (bundle.groups - bundle.settled(self._resample)) * algorithm.group_size
        return wanted

    def trained(self, key: StepKey) -> None:
        """Let go of the samples of an optimizer step and of all before it: they are done."""
        for done in [one for one in self._bundles if one <= key]:
            for bundle in self._bundles.pop(done).values():
                for group in bundle.rows:
                    del self._rows[group]
                    self._finished.add(group)
        self._go_on(key)

    def _go_on(self, key: StepKey) -> None:
        """Note that all steps up to this one are trained."""
        iteration, mini = key
        last = mini + 1 == self._context.spec.algorithm.optimizer_steps
        self._trained = (iteration + 1, 0) if last else (iteration, mini + 1)
        if last:
            self._finished.clear()
            self._unfit.trained()
            early, self._early = self._early, {}
            for record, sample in early.values():
                self._take(sample, record)

    def low_watermarks(self) -> dict[int, int]:
        """Return by partition the least position of a sample that is held, or that was not read yet."""
        marks = self.positions
        for bundles in self._bundles.values():
            for bundle in bundles.values():
                for rows in bundle.rows.values():
                    for row in rows.values():
                        marks[row.partition] = min(marks[row.partition], row.offset)
        for partition, offset in self._early:
            marks[partition] = min(marks[partition], offset)
        return marks

    def letters(self, marks: Mapping[int, int]) -> int | None:
        """Return a position in the dead letters; those before it are only about samples before `marks`."""
        return self._unfit.settled(marks)

    def close(self) -> None:
        """Close the readers."""
        self._tail.close()
        self._unfit.close()
        self._admitted.close()
