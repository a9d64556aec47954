"""Groups that were trained already, as a ledger says: each can be trained again.

    ledger ──► groups, and where their samples stand ──► drawn by seed ──► fetched from the log by position

Trajectory balance trains some of its own run's again (`loss.replay`); an offline run trains another run's.
"""

from __future__ import annotations

import filecmp
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from consumers.places import Place, fetch
from consumers.rows import Row
from consumers.stream import Bundle, Key
from infra.bus import read_all
from infra.errors import Explained
from infra.process import Context
from infra.runs import RunRecord, find
from infra.store import Exists
from schemas.identity import derive_seed
from schemas.messages import Evaluation, StepRecord
from schemas.topics import Topic, Topics
from schemas.wire import decode


class RecordedError(Explained):
    """A run's samples can't be trained again."""


class Recorded:
    """The groups of a ledger's steps, in the order in which they were trained."""

    def __init__(self, steps: Iterable[StepRecord] = ()) -> None:
        self._places: list[list[Place]] = []
        self._known: set[int] = set()
        self._steps = 0
        for step in steps:
            self.add(step)

    def add(self, step: StepRecord) -> None:
        """A step of the ledger."""
        if step.step < self._steps:
            return  # of a trainer that was thought dead: the first record of a step counts
        self._steps += 1
        fresh: dict[int, list[tuple[int, Place]]] = {}
        places = zip(step.partitions.tolist(), step.offsets.tolist(), strict=True)
        for group, index, place in zip(step.groups.tolist(), step.indexes.tolist(), places, strict=True):
            if group not in self._known:
                fresh.setdefault(group, []).append((index, place))
        self._known.update(fresh)
        self._places += [[place for _, place in sorted(fresh[group])] for group in sorted(fresh)]

    def __len__(self) -> int:
        return len(self._places)

    def places(self, numbers: Iterable[int]) -> list[Place]:
        """Where the samples of groups stand; groups are counted from 0."""
        return [place for number in numbers for place in self._places[number]]


class Replay:
    """Groups of this run that a step trains once more; which ones, the seed says."""

    def __init__(self, context: Context, steps: Iterable[StepRecord]) -> None:
        self._context = context
        algorithm = context.spec.algorithm
        self._count = round((context.spec.loss.replay or 0.0) * algorithm.groups / algorithm.optimizer_steps)
        self._recorded = Recorded(steps)

    def add(self, step: StepRecord) -> None:
        """A step was trained."""
        self._recorded.add(step)

    def rows(self, step: int) -> list[Row]:
        """For an optimizer step, by its number in the run."""
        count = min(self._count, len(self._recorded))
        if not count:
            return []
        draw = random.Random(derive_seed("replay", self._context.spec.seed, step))
        numbers = sorted(draw.sample(range(len(self._recorded)), count))
        return fetch(
            self._context.bus, self._context.topics.samples, self._recorded.places(numbers),
            what=f"earlier samples for step {step}", deadline_s=self._context.spec.deadlines.progress_s,
        )  # fmt: skip


class RecordedStream:
    """In place of the sample stream: the groups of another run, in an order that each epoch draws anew."""

    duplicates = 0

    def __init__(self, context: Context, vocabulary: int) -> None:
        algorithm = context.spec.algorithm
        source = _source(context, str(algorithm.recorded))
        self._context, self._vocabulary = context, vocabulary
        self._samples = Topics(source.id, source.spec.lengths.classes).samples
        self._size = algorithm.groups // algorithm.optimizer_steps
        self._minis = algorithm.optimizer_steps
        self._recorded = Recorded(_steps(context, source))
        if len(self._recorded) < self._size:
            raise RecordedError(
                f"run {source.id} has trained {len(self._recorded)} groups; a step here takes {self._size} "
                "(algorithm.groups, over algorithm.optimizer_steps)"
            )
        self._evaluations = context.bus.reader(context.topics.evals)
        self._evaluated: set[int] = set()
        self._held: tuple[Key, Bundle] | None = None
        self._order: tuple[int, list[int]] = (-1, [])
        context.log.info("%d groups are recorded in %s", len(self._recorded), source.id)

    def pump(self, wait_s: float) -> int:
        """All samples are here; how many evaluations have come."""
        records = self._evaluations.poll(wait_s)
        self._evaluated.update(decode(record.value, Evaluation).version for record in records)
        return len(records)

    def _is_measured(self, version: int) -> bool:
        """Whether the generators may have newer weights: nothing else would hold the trainer back."""
        return not self._context.spec.evaluates(version) or version in self._evaluated

    def complete(self, key: Key) -> list[Bundle]:
        """The groups of an optimizer step, as one bundle; none until its weights are evaluated."""
        if not self._is_measured(key[0]):
            return []
        if self._held is None or self._held[0] != key:
            rows = fetch(
                self._context.bus, self._samples,
                self._recorded.places(self._drawn(key[0] * self._minis + key[1])),
                what=f"recorded samples of iteration {key[0]}",
                deadline_s=self._context.spec.deadlines.progress_s,
            )  # fmt: skip
            bundle = Bundle(0, self._size)
            for row in rows:
                if max(row.sample.tokens.max(), row.sample.prompt_tokens.max()) >= self._vocabulary:
                    raise RecordedError(
                        f"sample {row.sample.id} of {self._context.spec.algorithm.recorded} has tokens that "
                        f"the model's vocabulary of {self._vocabulary} has not: it is of another model"
                    )
                bundle.rows.setdefault(row.sample.group, {})[row.sample.index] = row
            self._held = key, bundle
        return [self._held[1]]

    def _drawn(self, step: int) -> list[int]:
        """The groups of an optimizer step. Less than a step may be left at an epoch's end: it is not used."""
        epoch, place = divmod(step, len(self._recorded) // self._size)
        if self._order[0] != epoch:
            order = list(range(len(self._recorded)))
            random.Random(derive_seed("recorded", self._context.spec.seed, epoch)).shuffle(order)
            self._order = epoch, order
        return self._order[1][place * self._size : (place + 1) * self._size]

    def groups(self, key: Key) -> Iterator[list[Row]]:
        """None: all are trained at once."""
        return iter(())

    def outstanding(self, key: Key) -> int:
        """None, but those of an evaluation."""
        evaluation = self._context.spec.evaluation
        return 0 if self._is_measured(key[0]) else evaluation.problems * evaluation.per_problem

    def trained(self, key: Key) -> None:
        """An optimizer step is done."""
        self._held = None

    def low_watermarks(self) -> dict[int, int]:
        """The step's number says all."""
        return {}

    def close(self) -> None:
        """Let go of the reader."""
        self._evaluations.close()


def samples_topic(context: Context) -> Topic:
    """Where the samples of a run's steps stand: on its own topic, or on that of the run that it trains."""
    recorded = context.spec.algorithm.recorded
    if recorded is None:
        return context.topics.samples
    return Topics(recorded, find(context.store, recorded).spec.lengths.classes).samples


def _source(context: Context, run: str) -> RunRecord:
    """The run that was recorded, if its samples mean the same to our model."""
    source = find(context.store, run)
    if source.spec.algorithm.recorded is not None:
        raise RecordedError(
            f"run {run} has made no samples: it is offline itself. Name the run that it trained, "
            f"algorithm.recorded: {source.spec.algorithm.recorded}"
        )
    theirs_at, ours_at = (Path(one.model) / "tokenizer.json" for one in (source, context.record))
    if theirs_at.is_file() and ours_at.is_file() and not filecmp.cmp(theirs_at, ours_at, shallow=False):
        raise RecordedError(
            f"run {run} has another tokenizer ({theirs_at}) than the model here ({ours_at}): its tokens "
            "would mean something else"
        )
    theirs, ours = source.spec.sampling.temperature, context.spec.sampling.temperature
    if theirs != ours:
        raise RecordedError(
            f"run {run} was sampled at temperature {theirs:g}, and sampling.temperature is {ours:g} here: "
            "its logprobs would mean something else"
        )
    return source


def _steps(context: Context, source: RunRecord) -> list[StepRecord]:
    """The source's ledger as it was when this run began: what it trains must not grow."""
    ledger = Topics(source.id, source.spec.lengths.classes).ledger
    records = read_all(context.bus, ledger, deadline_s=context.spec.deadlines.progress_s)
    found = {"run": source.id, "first": records[0].offset, "end": records[-1].offset + 1} if records else {}
    key = f"runs/{context.run}/recorded.json"
    try:
        context.store.put_new(key, json.dumps(found).encode())
    except Exists:
        began = json.loads(context.store.get(key))
        if found.get("first") != began.get("first"):
            raise RecordedError(
                f"steps that run {source.id} had when {context.run} began are gone from {ledger.name} "
                "(placement.kafka.retention_hours of that run): other groups would be drawn. Start a new run"
            ) from None
        records = [record for record in records if record.offset < began["end"]]
    return [decode(record.value, StepRecord) for record in records]
