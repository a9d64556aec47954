"""The sample stream: records in, whole bundles out; each sample once, and nothing unfit for training.

    <run>.samples ──► readable? this run's? sound? new? ──► groups ──► bundles whose groups are all complete
                          └─ no: <run>.dead, with the reason

Positions are the trainer's own: `low_watermarks` is where a trainer must start to read again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from consumers.rows import Row, says_nothing
from infra.bus import Record
from infra.process import Context
from infra.tail import Tail
from schemas.admission import oldest_version, window_of
from schemas.identity import round_of
from schemas.messages import TRAIN, Sample
from schemas.wire import Unreadable, decode

Key = tuple[int, int]  # iteration and optimizer step in it


@dataclass
class Bundle:
    """Groups that are trained together."""

    number: int
    groups: int
    rows: dict[int, dict[int, Row]] = field(default_factory=dict)  # by group, by index

    @property
    def complete(self) -> bool:
        """Whether all samples of all groups are here."""
        return len(self.rows) == self.groups and all(
            len(rows) == next(iter(rows.values())).sample.size for rows in self.rows.values()
        )

    def settled(self, resample: int) -> int:
        """How many of its groups no other one will be drawn for."""
        return sum(
            round_of(group) >= resample or not says_nothing(row.sample for row in rows.values())
            for group, rows in self.rows.items()
        )

    def in_order(self) -> list[Row]:
        """All rows, by group and index."""
        return [self.rows[group][index] for group in sorted(self.rows) for index in sorted(self.rows[group])]


class Stream(Protocol):
    """Where a trainer gets the groups of its steps from."""

    duplicates: int

    def pump(self, wait_s: float) -> int:
        """Take what has come, or comes within `wait_s`; how many new samples there were."""

    def complete(self, key: Key) -> list[Bundle]:
        """The complete bundles of an optimizer step that are here now."""

    def whole_groups(self, key: Key) -> Iterator[list[Row]]:
        """Groups of an optimizer step that are whole, whether or not their bundle is."""

    def outstanding(self, key: Key) -> int:
        """How many samples of an optimizer step are not here yet."""

    def trained(self, key: Key) -> None:
        """An optimizer step is done: let go of its samples."""

    def low_watermarks(self) -> dict[int, int]:
        """By partition the position from which on nothing is trained that is not known to be."""

    def close(self) -> None:
        """Let go of the reader."""


class SampleStream:
    """Reads `<run>.samples` and keeps what is not trained yet."""

    def __init__(self, context: Context, vocabulary: int, start: Mapping[int, int], trained: Key) -> None:
        self._context, self._vocabulary = context, vocabulary
        self._trained = trained  # everything before this key is trained
        reader = context.bus.reader(context.topics.samples, start)
        self._next = reader.positions()
        self._bell = threading.Event()
        self._tail = Tail(reader, lambda records: records, self._bell)
        self._bundles: dict[Key, dict[int, Bundle]] = {}
        self._resample = context.spec.loss.resample or 0
        self.duplicates = 0
        self.received = 0

    def pump(self, wait_s: float) -> int:
        """Take what has come, or comes within `wait_s`; how many new samples there were."""
        before = self.received
        if wait_s:
            self._bell.wait(wait_s)
            self._bell.clear()
        for record in self._tail.take():
            self._next[record.partition] = record.offset + 1
            try:
                sample = decode(record.value, Sample)
            except Unreadable as error:
                self._context.dead_letter(record, str(error))
                continue
            if sample.purpose == TRAIN or sample.run != self._context.run:
                self._take(sample, record)
        return self.received - before

    def _take(self, sample: Sample, record: Record) -> None:
        reason = self.fault(sample)
        if reason:
            self._context.dead_letter(record, reason)
            return
        key = (sample.window, sample.mini)
        if key < self._trained:
            self.duplicates += 1
            return
        bundle = self._bundles.setdefault(key, {}).setdefault(
            sample.bundle, Bundle(sample.bundle, sample.bundle_groups)
        )
        rows = bundle.rows.setdefault(sample.group, {})
        known = rows.get(sample.index)
        if known is None:
            rows[sample.index] = Row(sample, record.partition, record.offset)
            self.received += 1
        elif np.array_equal(known.sample.tokens, sample.tokens):
            self.duplicates += 1
        elif sample.seed == known.sample.seed:
            self._context.dead_letter(
                record, f"sample {sample.id} came before with other tokens and the same seed"
            )
        else:
            self.duplicates += 1  # made again with newer weights after a generator died: the first one counts

    def fault(self, sample: Sample) -> str:
        """Why a sample can't be trained; empty if it can."""
        spec = self._context.spec
        algorithm = spec.algorithm
        if sample.run != self._context.run:
            return f"it is of run {sample.run}"
        if sample.size != algorithm.group_size or not 0 <= sample.index < sample.size:
            return f"index {sample.index} of {sample.size} does not fit groups of {algorithm.group_size}"
        if sample.window != window_of(sample.group, algorithm.groups):
            return f"group {sample.group} is not of iteration {sample.window}"
        if round_of(sample.group) > self._resample:
            return f"it is drawn in place of another more often than loss.resample allows ({self._resample})"
        for name, tokens in (("prompt", sample.prompt_tokens), ("answer", sample.tokens)):
            if tokens.size == 0:
                return f"the {name} is empty"
            if tokens.min() < 0 or tokens.max() >= self._vocabulary:
                return f"a token of the {name} is not in the vocabulary of {self._vocabulary}"
        if sample.logprobs.size != sample.tokens.size:
            return f"{sample.tokens.size} tokens have {sample.logprobs.size} logprobs"
        if not bool(np.isfinite(sample.logprobs).all()) or float(sample.logprobs.max()) > 1e-3:
            return "its logprobs are not logprobs"
        if sample.versions.size == 0 or sample.versions.size != sample.version_starts.size:
            return "it does not say which weights made it"
        oldest = oldest_version(sample.group, algorithm.groups, algorithm.lookahead)
        if int(sample.versions.min()) < oldest:
            return f"weights {int(sample.versions.min())} made it; its iteration allows {oldest} and newer"
        if algorithm.mode == "sync" and int(sample.versions.max()) != sample.window:
            return f"weights {int(sample.versions.max())} made it; on-policy needs {sample.window}"
        if not sample.reward_error and not np.isfinite(sample.reward):
            return "its reward is not a number"
        return ""

    @property
    def positions(self) -> dict[int, int]:
        """By partition the position behind the last record taken."""
        return dict(self._next)

    def complete(self, key: Key) -> list[Bundle]:
        """The complete bundles of an optimizer step that are here now; they are handed out once."""
        bundles = self._bundles.get(key, {})
        ready = [bundle for bundle in bundles.values() if bundle.complete]
        return sorted(ready, key=lambda bundle: bundle.number)

    def whole_groups(self, key: Key) -> Iterator[list[Row]]:
        """Groups of an optimizer step that are whole, whether or not their bundle is."""
        for bundle in self._bundles.get(key, {}).values():
            for rows in bundle.rows.values():
                if len(rows) == next(iter(rows.values())).sample.size:
                    yield [rows[index] for index in sorted(rows)]

    def outstanding(self, key: Key) -> int:
        """How many samples of an optimizer step are not here yet."""
        algorithm = self._context.spec.algorithm
        wanted = algorithm.groups // algorithm.optimizer_steps * algorithm.group_size
        for bundle in self._bundles.get(key, {}).values():
            wanted -= sum(len(rows) for rows in bundle.rows.values())
            if self._resample and bundle.complete:  # others come in the place of those that tell nothing
                wanted += (bundle.groups - bundle.settled(self._resample)) * algorithm.group_size
        return wanted

    def trained(self, key: Key) -> None:
        """An optimizer step is done: let go of its samples."""
        self._bundles.pop(key, None)
        window, mini = key
        last = mini + 1 == self._context.spec.algorithm.optimizer_steps
        self._trained = (window + 1, 0) if last else (window, mini + 1)

    def low_watermarks(self) -> dict[int, int]:
        """By partition the position from which on nothing is trained that is not known to be."""
        marks = dict(self._next)
        for bundles in self._bundles.values():
            for bundle in bundles.values():
                for rows in bundle.rows.values():
                    for row in rows.values():
                        marks[row.partition] = min(marks[row.partition], row.offset)
        return marks

    def close(self) -> None:
        """Let go of the reader."""
        self._tail.close()
