"""Restores a feeder's state: reads the newest snapshot, and the records that came on the topics since.

snapshot ──► positions ──► ledger: how far is it trained?  prompts: which are open?  evals, dead letters
   └─ none that fits: the beginning, as far as the log is kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from infra.bus import Record, clamp, ends_of, read_until
from infra.gate import Gate, Refuse, passed_over
from infra.roles.context import RoleContext
from infra.weights.versions import WeightStore
from producers.chat import Tokenize
from producers.dispatch.jobs import Placed, RecordPlace
from producers.ledger_steps import Behind, Steps
from producers.planner import Planner
from producers.sample_feed import FeederRoots
from producers.snapshots import FeederSnapshot, Opened, Positions
from producers.tasks import Problem
from schemas.admission import latest_iteration
from schemas.fitness import deal_fault
from schemas.identity import round_of
from schemas.messages import EVAL, TRAIN, DeadLetter, Evaluation, Prompt, StepRecord
from schemas.runspec import RunSpec
from schemas.topics import Topic
from schemas.wire import MessageT


@dataclass
class FeederState:
    """The state of a run, from which a feeder goes on."""

    snapshot: FeederSnapshot | None
    trained: int  # iterations that are trained, by the ledger's present end
    planner: Planner  # as in the snapshot; it has not observed the ledger since
    prompts: dict[int, Placed]  # open prompts on the topic, by group
    opened: Opened  # where reading of prompts and dead letters began
    letters: KnownDeadLetters
    evaluated: set[int]
    evals: int  # position behind the evaluations that were read
    behind: Behind
    roots: FeederRoots
    start: Positions  # positions to read `<run>.samples` from

    @property
    def iterations(self) -> dict[int, Opened]:
        """Where topics ended before each open iteration was admitted.

        Iterations that the snapshot does not have were admitted after it.
        """
        known = self.snapshot.iterations if self.snapshot else {}
        iterations = {one.prompt.iteration for one in self.prompts.values() if one.prompt.purpose == TRAIN}
        return {w: known.get(w, self.opened) for w in {*iterations, *known} if w >= self.trained}


@dataclass(frozen=True)
class KnownDeadLetters:
    """The records that are dead letters already, and the position up to which dead letters were read."""

    places: set[tuple[str, int, int]]  # topic, partition and position
    position: int

    def of(self, topic: Topic) -> set[RecordPlace]:
        """Return the places on one topic."""
        return {
            RecordPlace(partition, offset) for name, partition, offset in self.places if name == topic.name
        }


def look_at(
    context: RoleContext, snapshot: FeederSnapshot | None, train: list[Problem], tokenize: Tokenize
) -> FeederState:
    """Read the records since a snapshot; without a snapshot, all that the log still has."""
    most_stale = context.spec.algorithm.most_stale
    behind = Behind(most_stale)
    if snapshot:
        behind = Behind(most_stale, snapshot.samples, snapshot.samples_of)
    roots = FeederRoots(context, snapshot.roots if snapshot else None)
    trained = _trained(context, snapshot, behind, roots)
    opened = snapshot.opened() if snapshot else Opened()
    letters = letters_of(context, opened.dead)
    evaluated, evals = _evaluations(context, snapshot, letters)
    open_then = {one.version for one in snapshot.evaluations} if snapshot else set()
    first = snapshot.planner.version if snapshot else trained - int(min(most_stale, 128)) - 1

    def is_being_evaluated(version: int) -> bool:
        return version not in evaluated and (version >= first or version in open_then)

    prompts: dict[int, Placed] = {}
    planner = Planner(
        context.run, context.spec, train, tokenize,
        _prompts(context, opened, letters, prompts, trained, is_being_evaluated),
        state=snapshot.planner if snapshot else None, trained=trained,
    )  # fmt: skip
    start = behind.at(trained)
    if math.isinf(most_stale):  # its samples are all of evaluations
        start = dict(snapshot.samples) if snapshot else {}
    for evaluation in snapshot.evaluations if snapshot else []:
        if evaluation.version not in evaluated:
            start = {p: min(at, evaluation.samples.get(p, 0)) for p, at in start.items()}
    return FeederState(
        snapshot, trained, planner, prompts, opened, letters, evaluated, evals, behind, roots, start
    )  # fmt: skip


def misfit(context: RoleContext, snapshot: FeederSnapshot) -> str:
    """Return why a snapshot contradicts the log or the run file; empty if it fits."""
    bus, topics = context.bus, context.topics
    opened = snapshot.opened()
    for topic, positions in (
        (topics.ledger, {0: snapshot.ledger}), (topics.prompts, opened.prompts),
        (topics.dead, {0: opened.dead}), (topics.evals, {0: snapshot.evals}),
        (topics.samples, snapshot.samples),
    ):  # fmt: skip
        ends = ends_of(bus, topic)
        for partition, position in positions.items():
            if position > (end := ends.get(partition, 0)):
                return f"it is newer than {topic.name}, which ends at {end}: it names position {position}"
    if len(snapshot.planner.edges) != context.spec.lengths.classes - 1:
        classes = context.spec.lengths.classes
        return f"it has {len(snapshot.planner.edges)} edges of classes, and lengths.classes is {classes}"
    return _other_ledger(context, snapshot)


def _other_ledger(context: RoleContext, snapshot: FeederSnapshot) -> str:
    """Return how the ledger contradicts the snapshot's last step; empty if it agrees or that step is gone."""
    topic, before = context.topics.ledger, snapshot.ledger - 1
    reader = context.bus.reader(topic, {0: max(0, before)})
    try:
        if before < reader.begin_offsets()[0]:
            return ""
        deadline_s = context.spec.deadlines.progress_s
        record = next(read_until(reader, {0: snapshot.ledger}, topic, deadline_s=deadline_s))
        step = Gate(StepRecord, context.run, passed_over).take_one(record)
        if step is not None and step.step != snapshot.planner.steps - 1:
            return f"{record.place} is step {step.step}, and was step {snapshot.planner.steps - 1} before"
        return ""
    finally:
        reader.close()


def _trained(
    context: RoleContext, snapshot: FeederSnapshot | None, behind: Behind, roots: FeederRoots
) -> int:
    """Return how many iterations are trained, by the ledger's present end."""
    planner = snapshot.planner if snapshot else None
    trained = planner.version if planner else 0
    steps = Steps(context, snapshot.ledger if snapshot else 0, planner.steps if planner else 0).open()
    try:
        end, any_left = steps.end(), False
        for step in steps.up_to(end):
            trained, any_left = step.iteration + step.last_of_iteration, True
            behind.take(step)
            behind.at(trained)
            roots.learn(step)
        if steps.gone and not any_left:  # then the newest weights tell how many are trained
            trained = max([trained, *WeightStore(context.store, context.run).versions()])
        return trained
    finally:
        steps.close()


def letters_of(context: RoleContext, position: int) -> KnownDeadLetters:
    """Read the dead letters from a position to their present end."""
    topic = context.topics.dead
    end = ends_of(context.bus, topic)[0]
    gate = Gate(DeadLetter, context.run, passed_over)  # a letter that can't be read makes no other letter
    read = _read(context, topic, {0: position}, gate, {0: end})
    return KnownDeadLetters({(letter.topic, letter.partition, letter.offset) for _, letter in read}, end)


def _evaluations(
    context: RoleContext, snapshot: FeederSnapshot | None, letters: KnownDeadLetters
) -> tuple[set[int], int]:
    """Return the versions that are evaluated, and the position up to which the topic was read."""
    topic = context.topics.evals
    end = ends_of(context.bus, topic)[0]
    gate = Gate(Evaluation, context.run, _reports(context, letters))
    read = _read(context, topic, {0: snapshot.evals if snapshot else 0}, gate)
    return {one.version for _, one in read} | set(snapshot.evaluated if snapshot else []), end


def _prompts(
    context: RoleContext, opened: Opened, letters: KnownDeadLetters, still_open: dict[int, Placed],
    trained: int, is_being_evaluated: Callable[[int], bool],
) -> Iterator[Prompt]:  # fmt: skip
    """Yield each prompt on the topic, and put the open ones into `still_open`."""
    spec = context.spec
    gate = Gate(
        Prompt, context.run, _reports(context, letters), unfit=lambda prompt: wrong_prompt(prompt, spec)
    )
    for record, prompt in _read(context, context.topics.prompts, opened.prompts, gate):
        is_open = prompt.iteration >= trained
        if prompt.purpose == EVAL:
            is_open = is_being_evaluated(prompt.iteration)
        if is_open:
            still_open.setdefault(prompt.group, Placed(prompt, RecordPlace(record.partition, record.offset)))
        yield prompt


def wrong_prompt(prompt: Prompt, spec: RunSpec) -> str:
    """Return why this run's feeder can't have sent a prompt; empty if it can."""
    classes, algorithm = spec.lengths.classes, spec.algorithm
    if len(prompt.edges) != classes - 1 or prompt.length_class >= classes:
        edges = len(prompt.edges)
        return f"it is of class {prompt.length_class}, with {edges} edges; lengths.classes is {classes}"
    if prompt.purpose == EVAL:
        return "" if prompt.group < 0 else f"group {prompt.group} is no group of an evaluation"
    if prompt.group < 0 or prompt.iteration != latest_iteration(prompt.group, algorithm):
        return f"group {prompt.group} is not of iteration {prompt.iteration}"
    if prompt.size != algorithm.group_size or round_of(prompt.group) > spec.loss.most_draws:
        return f"this run has no group {prompt.group} of {prompt.size} samples"
    return deal_fault(prompt, spec)


def _reports(context: RoleContext, letters: KnownDeadLetters) -> Refuse:
    """Return a function that makes a refused record a dead letter, unless it is one already."""

    def refuse(record: Record, reason: str) -> None:
        if (record.topic, record.partition, record.offset) not in letters.places:
            context.dead_letter(record, reason)

    return refuse


def _read(
    context: RoleContext, topic: Topic, start: Mapping[int, int], gate: Gate[MessageT],
    ends: Mapping[int, int] | None = None,
) -> Iterator[tuple[Record, MessageT]]:  # fmt: skip
    """Yield the messages of a topic one by one, up to `ends`, or to its present end."""
    reader = context.bus.reader(topic, start)
    try:
        if gone := clamp(reader):
            context.log.info(
                "%d records of %s are gone (placement.kafka.retention_hours)", sum(gone.values()), topic.name
            )
        ends, deadline_s = ends or reader.end_offsets(), context.spec.deadlines.progress_s
        records = read_until(reader, ends, topic, deadline_s=deadline_s)
        yield from gate.take(one for one in records if one.offset < ends[one.partition])
    finally:
        reader.close()
