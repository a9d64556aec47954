"""Groups that a ledger records as trained, to be trained again.

    ledger ──► groups, and where their samples stand ──► drawn by seed ──► fetched from the log by position

Trajectory balance trains some groups of its own run again (`loss.replay`), an offline run another run's.
"""

from __future__ import annotations

import filecmp
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from consumers.batches.log_places import Gone, fetch
from consumers.batches.training_rows import TrainingRow
from consumers.steps.ledger import steps_in_log
from consumers.stream.inherited_groups import groups_before
from consumers.stream.recorded_places import Recorded
from consumers.stream.sample_stream import Bundle, StepKey
from infra.bus import begins_of, clamp, ends_of
from infra.errors import Explained
from infra.gate import Gate, passed_over
from infra.roles.context import RoleContext
from infra.route_shapes import followed_shape
from infra.run_handle import RunHandle
from infra.runs import RunRecord, find
from infra.stores.store import Exists
from schemas.expert_routes import wrong_routes
from schemas.identity import derive_seed
from schemas.messages import Evaluation, Sample, StepRecord
from schemas.topics import Topic, Topics

_LARGEST = 4096  # bytes of what says where a run began: it has some sixty
_EVALUATIONS = 64  # newest ones that are read at a start; they include those of current weights


class RecordedError(Explained):
    """The samples of a run can't be trained again."""

    lasting = True


class Replay:
    """Earlier groups of this run that a step trains once more; the run's seed decides which."""

    def __init__(self, context: RoleContext, step: int) -> None:
        """`step`: number of the next step."""
        self._context = context
        algorithm = context.spec.algorithm
        self._count = round(context.spec.loss.old_groups * algorithm.groups / algorithm.optimizer_steps)
        self._recorded = groups_before(context, step)

    def add(self, step: StepRecord) -> None:
        """Add a step that was trained."""
        self._recorded.add(step)

    def rows(self, step: int) -> list[TrainingRow]:
        """Return the rows that an optimizer step trains once more. `step`: its number in the run."""
        try:
            return self._drawn(step)
        except Gone as error:
            self._context.log.warning("earlier samples are gone, and are not trained again: %s", error)
        samples = self._context.topics.samples
        self._recorded.drop(begins_of(self._context.bus, samples))
        return self._drawn(step)

    def _drawn(self, step: int) -> list[TrainingRow]:
        count = min(self._count, len(self._recorded))
        if not count:
            return []
        draw = random.Random(derive_seed("replay", self._context.spec.seed, step))
        numbers = sorted(draw.sample(range(len(self._recorded)), count))
        return fetch(
            self._context.bus, self._context.topics.samples, self._recorded.places(numbers),
            what=f"the earlier samples for step {step}", deadline_s=self._context.spec.deadlines.progress_s,
        )  # fmt: skip


class RecordedStream:
    """A stream of another run's groups, in place of the sample stream; each epoch draws a new order."""

    duplicates = 0

    def __init__(self, context: RoleContext, vocabulary: int) -> None:
        self._context, self._vocabulary = context, vocabulary
        self._route_shape = followed_shape(context.record.model, context.spec)
        self._gate = Gate(Evaluation, context.run, passed_over)
        self._evaluated: set[int] = set()
        self._held: tuple[StepKey, Bundle] | None = None
        self._order: tuple[int, list[int]] = (-1, [])

    def open(self) -> RecordedStream:
        """Find the recorded groups. Raises RecordedError if they can't be trained. Return itself."""
        context, algorithm = self._context, self._context.spec.algorithm
        source = _source(context, str(algorithm.recorded))
        self._samples = Topics(source.id, source.spec.lengths.classes).samples
        self._size = algorithm.groups // algorithm.optimizer_steps
        self._minis = algorithm.optimizer_steps
        self._recorded = Recorded(source.spec.algorithm, _steps(context, source))
        if len(self._recorded) < self._size:
            raise RecordedError(
                f"run {source.id} has trained {len(self._recorded)} groups; a step of this run takes "
                f"{self._size} (algorithm.groups divided by algorithm.optimizer_steps)"
            )
        ends = ends_of(context.bus, context.topics.evals)
        start = {partition: max(0, end - _EVALUATIONS) for partition, end in ends.items()}
        self._evaluations = context.bus.reader(context.topics.evals, start)
        clamp(self._evaluations)
        context.log.info("%d groups are recorded in %s", len(self._recorded), source.id)
        return self

    def pump(self, wait_s: float) -> int:
        """Read evaluations; return the number of records that came. All samples are here already."""
        records = self._evaluations.poll(wait_s)
        self._evaluated.update(one.version for one in self._gate.messages(records))
        return len(records)

    def _is_measured(self, version: int) -> bool:
        """Return whether a version was evaluated or need not be; nothing else holds this trainer back."""
        return not self._context.spec.evaluates(version) or version in self._evaluated

    def complete(self, key: StepKey) -> list[Bundle]:
        """Return the groups of an optimizer step as one bundle; no bundle until its weights are evaluated."""
        if not self._is_measured(key[0]):
            return []
        if self._held is None or self._held[0] != key:
            rows = fetch(
                self._context.bus, self._samples,
                self._recorded.places(self._drawn(key[0] * self._minis + key[1])),
                what=f"the recorded samples of iteration {key[0]}",
                deadline_s=self._context.spec.deadlines.progress_s,
            )  # fmt: skip
            bundle = Bundle(0, self._size)
            for row in rows:
                if max(row.sample.tokens.max(), row.sample.prompt_tokens.max()) >= self._vocabulary:
                    raise RecordedError(
                        f"sample {row.sample.id} of run {self._context.spec.algorithm.recorded} has tokens "
                        f"that the model's vocabulary of {self._vocabulary} has not: another model drew them"
                    )
                self._check_routes(row.sample)
                bundle.rows.setdefault(row.sample.group, {})[row.sample.index] = row
            self._held = key, bundle
        return [self._held[1]]

    def _check_routes(self, sample: Sample) -> None:
        """Raise RecordedError if a sample has routes that this run's model can't follow; it may have none."""
        tokens = sample.prompt_tokens.size + sample.tokens.size - 1
        shape = self._route_shape
        if shape and sample.routes and (why := wrong_routes(sample.routes, tokens, shape)):
            raise RecordedError(
                f"sample {sample.id} of run {self._context.spec.algorithm.recorded}: {why}. Set "
                "model.follow_routes: false"
            )

    def _drawn(self, step: int) -> list[int]:
        """Return the groups of an optimizer step. An epoch leaves out groups that do not fill a step."""
        epoch, place = divmod(step, len(self._recorded) // self._size)
        if self._order[0] != epoch:
            order = list(range(len(self._recorded)))
            random.Random(derive_seed("recorded", self._context.spec.seed, epoch)).shuffle(order)
            self._order = epoch, order
        return self._order[1][place * self._size : (place + 1) * self._size]

    def groups(self, key: StepKey) -> Iterator[list[TrainingRow]]:
        """Yield nothing: no groups need to be scored ahead."""
        return iter(())

    def outstanding(self, key: StepKey) -> int:
        """Return 0, or the number of samples of an evaluation that is not done."""
        evaluation = self._context.spec.evaluation
        return 0 if self._is_measured(key[0]) else evaluation.problems * evaluation.per_problem

    def trained(self, key: StepKey) -> None:
        """Let go of the samples of a step that is done."""
        self._held = None
        self._evaluated = {version for version in self._evaluated if version >= key[0]}

    def low_watermarks(self) -> dict[int, int]:
        """Return no positions: the number of the step says which groups come next."""
        return {}

    def letters(self, marks: Mapping[int, int]) -> int | None:
        """Return None: this stream writes no dead letters."""
        return None

    def close(self) -> None:
        """Close the reader."""
        self._evaluations.close()


def samples_topic(handle: RunHandle) -> Topic:
    """Return the topic with the samples of a run's steps: its own, or that of the run that it trains."""
    recorded = handle.spec.algorithm.recorded
    if recorded is None:
        return handle.topics.samples
    return Topics(recorded, find(handle.store, recorded).spec.lengths.classes).samples


def _source(handle: RunHandle, run: str) -> RunRecord:
    """Return the recorded run. Raises RecordedError if its samples would mean something else to our model."""
    source = find(handle.store, run)
    if source.spec.algorithm.recorded is not None:
        raise RecordedError(
            f"run {run} has made no samples, as it is an offline run too: name the run whose samples it "
            f"trained (algorithm.recorded: {source.spec.algorithm.recorded})"
        )
    theirs_at, ours_at = (Path(one.model) / "tokenizer.json" for one in (source, handle.record))
    if theirs_at.is_file() and ours_at.is_file() and not filecmp.cmp(theirs_at, ours_at, shallow=False):
        raise RecordedError(
            f"run {run} has another tokenizer ({theirs_at}) than this run's model ({ours_at}): here its "
            "tokens stand for other text. Take a model with that tokenizer"
        )
    theirs, ours = source.spec.sampling.temperature, handle.spec.sampling.temperature
    if theirs != ours:
        raise RecordedError(
            f"run {run} was sampled at temperature {theirs:g}, and sampling.temperature is {ours:g} here, so "
            f"their logprobs can't be compared: set it to {theirs:g}"
        )
    their_least, our_least = source.spec.sampling.min_tokens, handle.spec.sampling.min_tokens
    if their_least != our_least:
        raise RecordedError(
            f"run {run} was sampled with min_tokens {their_least}, and sampling.min_tokens is {our_least} "
            f"here, so their logprobs can't be compared: set it to {their_least}"
        )
    return source


def _steps(handle: RunHandle, source: RunRecord) -> Iterator[StepRecord]:
    """Yield the steps that the source's ledger had when this run began: later ones must not be drawn."""
    ledger = Topics(source.id, source.spec.lengths.classes).ledger
    begins, ends = begins_of(handle.bus, ledger), ends_of(handle.bus, ledger)
    found: dict[str, Any] = (
        {"run": source.id, "first": begins[0], "end": ends[0]} if ends[0] > begins[0] else {}
    )
    key = f"runs/{handle.run}/recorded.json"
    try:
        handle.store.put_new(key, json.dumps(found).encode())
    except Exists:
        began = _began(handle, key)
        if found.get("first") != began.get("first"):
            raise RecordedError(
                f"{ledger.name} does not begin where it did when run {handle.run} began: steps of run "
                f"{source.id} were removed or added at its start, and other groups would be drawn. Start a "
                "new run"
            ) from None
        found = began
    if not found:
        return
    for record, step in steps_in_log(handle, source.id, source.spec, int(found["first"])):
        if record.offset >= int(found["end"]):
            return
        yield step


def _began(handle: RunHandle, key: str) -> dict[str, Any]:
    """Read which part of the source's ledger this run began with; empty if it had no steps."""
    try:
        began = json.loads(handle.store.get(key, _LARGEST))
        return {name: began[name] for name in ("run", "first", "end")} if began else {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordedError(
            f"{handle.store.url}/{key} does not say which steps the run began with ({error!r}): start a "
            "new run"
        ) from None
