"""The groups in work at the step where a fork begins: admitted by its run before, and not trained.

    run's prompts, from log or archive ──► those in work ──► the fork's own prompts
    run's ledger, and the end of its samples ──► their samples, drawn by weights that both have
                                                                 └──► the fork's own samples

So the fork is a run that was interrupted there: answers that were drawn by then are trained, not drawn again.
With order arrival it has to be so: groups with long answers wait the longest, and if these were drawn again,
shorter ones would take their place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from consumers.batches.log_places import Gone, LogPlace, fetch
from consumers.batches.training_rows import TrainingRow
from consumers.replay import Again
from consumers.steps.checkpoint import Checkpoints
from consumers.steps.ledger import steps_in_ledger
from consumers.stream.admitted import admitted_prompts
from consumers.stream.inherited_groups import copied_samples
from flows.run.request import RunFailed
from infra.bus import clamp, read_until
from infra.gate import Gate, passed_over
from infra.run_handle import RunHandle
from producers.planner import PlannerPast
from producers.restart import wrong_prompt
from schemas.admission import admissible, first_open, is_of_run, latest_iteration
from schemas.identity import ROUND, SampleKey, round_of
from schemas.messages import TRAIN, Prompt, Sample
from schemas.taken import TakenGroups, trained_first
from schemas.wire import encode

_AT_ONCE = 256  # samples that are held at once


@dataclass(frozen=True)
class GroupsInWork:
    """The state of a fork's groups."""

    admitted: int  # groups, without resampled ones; later ones are admitted by the fork
    taken: Sequence[int]  # as in a checkpoint
    redrawn: Sequence[int]
    planned: PlannerPast = field(default_factory=PlannerPast)


def none_in_work(parent: RunHandle, fork: RunHandle, taken: TakenGroups, iteration: int) -> GroupsInWork:
    """Return the state of a fork that admits all groups again that are not trained."""
    state = _state(first_open(iteration, fork.spec.algorithm), taken)
    return replace(state, planned=_planned(fork, _prompts(parent, iteration), iteration, state.admitted))


def _prompts(parent: RunHandle, iteration: int) -> dict[int, Prompt]:
    """Return the prompts of the iterations just before one, and of those that might be in work then."""
    found = admitted_prompts(
        parent, iteration - 1 - PlannerPast.ITERATIONS, iteration + int(parent.spec.algorithm.most_stale) + 1,
        unfit=lambda prompt: wrong_prompt(prompt, parent.spec),
    )  # fmt: skip
    return {prompt.group: prompt for prompt in found}


def _planned(fork: RunHandle, prompts: Mapping[int, Prompt], iteration: int, admitted: int) -> PlannerPast:
    return PlannerPast.of(prompts.values(), fork.spec.algorithm, fork.spec.lengths, iteration, admitted)


def _state(admitted: int, taken: TakenGroups) -> GroupsInWork:
    """A group that told nothing, and in whose place none comes, is admitted again itself."""
    again = {group % ROUND for group in taken.waiting() if group % ROUND >= admitted}
    known = [group for group in taken.known() if group % ROUND not in again]
    return GroupsInWork(admitted, known, [group for group in taken.redrawn() if group in set(known)])


def give_groups_in_work(
    again: Again, parent: RunHandle, fork: RunHandle, roots: Mapping[int, str]
) -> GroupsInWork:
    """Give a fork the groups that its run had in work then. `roots`: of versions that both have."""
    assert fork.record.fork is not None
    iteration, taken = fork.record.fork.iteration, again.taken
    algorithm = parent.spec.algorithm
    found = _prompts(parent, iteration)
    waiting = set(taken.waiting())
    in_work = {
        group: prompt for group, prompt in found.items()
        if is_of_run(group, fork.spec.algorithm)
        and (group in waiting or (group not in taken and latest_iteration(group, algorithm) >= iteration))
    }  # fmt: skip
    admitted = _admitted_then(parent, fork, iteration, taken, in_work)
    state = _state(admitted, taken)
    in_work = {group: prompt for group, prompt in in_work.items() if group % ROUND < admitted}
    giving = _Giving(parent, fork, iteration, roots)
    given, whole, open_places = dict[int, Prompt](), set[int](), waiting & set(state.taken)
    for number in range(parent.spec.loss.most_draws + 1):
        mine = {
            group: prompt for group, prompt in in_work.items()
            if round_of(group) == number and (not number or group - ROUND in whole | open_places)
        }  # fmt: skip
        whole |= giving.give(mine)
        given |= mine
    lost = [group for group in open_places if group not in whole and group + ROUND not in given]
    if lost:
        raise RunFailed(
            f"groups such as {lost[0]} told nothing, and others are to be drawn in their place: whoever does "
            "that needs their samples, and neither log nor archive has them. Fork at a later step"
        )
    planned = _planned(fork, found, iteration, admitted)
    return GroupsInWork(admitted, state.taken, state.redrawn, planned)


def _admitted_then(
    parent: RunHandle, fork: RunHandle, iteration: int, taken: TakenGroups, in_work: Collection[int]
) -> int:
    """Return how many groups were admitted before an iteration was trained whose prompts are all there."""
    algorithm = parent.spec.algorithm
    first = first_open(iteration, algorithm)
    most = min(algorithm.iterations, fork.spec.algorithm.iterations) * algorithm.groups
    trained = {group for group in taken.waiting() if group not in in_work}  # whose prompts are gone
    gone = {group % ROUND for group in trained}
    for version in range(iteration):
        until = min(most, admissible(version, algorithm.groups, algorithm.lookahead))
        lot = range(first, until)
        if any(group in gone or (group not in in_work and group not in taken) for group in lot):
            break
        first = max(first, until)
    return first


class _Giving:
    """Copies prompts and samples of groups in work to a fork's topics."""

    def __init__(self, parent: RunHandle, fork: RunHandle, iteration: int, roots: Mapping[int, str]) -> None:
        self._parent, self._fork, self._iteration, self._roots = parent, fork, iteration, roots

    def give(self, prompts: Mapping[int, Prompt]) -> set[int]:
        """Copy these groups, and return those that have all their samples."""
        counts = dict.fromkeys(prompts, 0)
        if not prompts:
            return set()
        writer, topic = self._fork.bus.writer(), self._fork.topics.prompts
        try:
            for group, prompt in prompts.items():
                mine = encode(structs.replace(prompt, run=self._fork.run))
                writer.send(topic, mine, key=str(group), partition=prompt.length_class)
            writer.flush(self._fork.spec.deadlines.progress_s)
            for rows in self._rows(set(prompts)):
                fit = [row for row in rows if self._is_of_both(row.sample)]
                copied_samples(self._fork, writer, fit)
                for row in fit:
                    counts[row.sample.group] += 1
        finally:
            writer.close()
        return {group for group, count in counts.items() if count == prompts[group].size}

    def _is_of_both(self, sample: Sample) -> bool:
        """Whether only weights drew a sample that both runs have."""
        named = zip(sample.versions.tolist(), sample.roots, strict=True)
        return all(self._roots.get(version) == root for version, root in named)

    def _rows(self, groups: set[int]) -> Iterator[list[TrainingRow]]:
        """Yield samples of groups, each once: those that a step trained, and others at the log's end."""
        trained = self._trained(groups)
        places, done = list(trained.values()), {group for group, _ in trained}
        for first in range(0, len(places), _AT_ONCE):
            yield self._fetched(places[first : first + _AT_ONCE])
        if left := groups - done:
            yield from self._at_the_end(left)

    def _trained(self, groups: set[int]) -> dict[SampleKey, LogPlace]:
        """Return the places of samples that the ledger names, around the step where the fork begins."""
        algorithm = self._parent.spec.algorithm
        most_stale = int(algorithm.most_stale) + 1
        first = max(0, self._iteration - most_stale)
        found: dict[SampleKey, LogPlace] = {}
        wanted = np.array(sorted(groups), np.int64)
        start = self._parent.ledger_before(first * algorithm.optimizer_steps)
        for step in steps_in_ledger(self._parent, start):
            if step.iteration > self._iteration + most_stale:
                break
            rows = np.flatnonzero(trained_first(step, algorithm) & np.isin(step.groups, wanted))
            for row in rows.tolist():
                key = int(step.groups[row]), int(step.indexes[row])
                found.setdefault(key, (int(step.partitions[row]), int(step.offsets[row])))
        return found

    def _fetched(self, places: Sequence[LogPlace]) -> list[TrainingRow]:
        """Return the samples at some places, or none: then they are drawn again."""
        parent = self._parent
        try:
            return fetch(
                parent.bus, parent.topics.samples, places, what="samples of groups in work",
                deadline_s=parent.spec.deadlines.progress_s,
            )  # fmt: skip
        except Gone:
            return [] if len(places) == 1 else [row for one in places for row in self._fetched([one])]

    def _at_the_end(self, groups: Collection[int]) -> Iterator[list[TrainingRow]]:
        """Yield samples of groups that no step has trained: all come after the newest checkpoint's place."""
        parent, topic = self._parent, self._parent.topics.samples
        newest = Checkpoints(parent.store, parent.run).restored(lambda state: None, parent.log.warning)
        reader = parent.bus.reader(topic, newest.positions if newest else {})
        gate, seen, rows = Gate(Sample, parent.run, passed_over), set[SampleKey](), list[TrainingRow]()
        try:
            clamp(reader)
            ends = reader.end_offsets()
            for record in read_until(reader, ends, topic, deadline_s=parent.spec.deadlines.progress_s):
                sample = gate.take_one(record)
                if sample is None or sample.purpose != TRAIN or sample.group not in groups:
                    continue
                if (key := (sample.group, sample.index)) not in seen and self._is_of_both(sample):
                    seen.add(key)
                    rows.append(TrainingRow(sample, record.partition, record.offset))
                if len(rows) == _AT_ONCE:
                    yield rows
                    rows = []
        finally:
            reader.close()
        yield rows
