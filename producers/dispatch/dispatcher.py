"""The dispatcher's core: decides which generator gets which job. It has no clock of its own and no Kafka.

admit, join, leave, finished, progress ──► board ──► turn(now) ──► (generator, jobs)
                                             ▲
                                           policy

It keeps only jobs that are admitted and not forgotten, so its memory does not grow with the length of a run.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from producers.dispatch.board import Board, BoardGenerator, speed_order
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import Policy
from schemas.identity import SampleKey
from schemas.messages import Part

# The only generator gets so many jobs beyond its slots: then it never waits for us, and one that joins still
# finds most of the work not given away. It gets more when a quarter of them is begun.
ALONE = 1024

# Of very many jobs the first are sent off before the last are dealt: so many in the first turn, and in each
# further one twice as many, so that generators get few records.
_FIRST_GIVEN, _MOST_GIVEN = 4096, 32_768

# If more jobs run, a sample that is done corrects the running ones of its group only where others of it wait:
# a plan for so many hardly depends on a single one, and to correct them takes 50 µs.
_LOOKED_AT_EACH = 8192

# Samples end and jobs come in bunches, so jobs are given ahead for so many times the mean latency; and never
# more than so many for each slot, whatever a generator says of its speed.
_BUNCHES, _MOST_AHEAD = 1.5, 16


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Keep Python from looking for garbage while very many objects come and none goes: that takes longer."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class _AdmittedGroup:
    """A group that is admitted and not forgotten."""

    count: int = 0  # the highest index of its jobs, plus 1
    done: set[int] = field(default_factory=set)  # indexes of its samples that are done


class Dispatcher:
    """Gives each job to one generator; the jobs of a generator that is lost are given again."""

    def __init__(self, policy: Policy, *, latency_s: float = 0.0) -> None:
        """`latency_s`: seconds until a generator can begin a job that it is given."""
        self._policy, self._board, self._latency_s = policy, Board(), latency_s
        self._groups: dict[int, _AdmittedGroup] = {}
        self._home = self._board.home
        self._ask: set[str] = set()  # generators with slots that have become free
        self._ask_all = False
        self.has_more = False  # whether the last turn ended before all was dealt
        self._most = _FIRST_GIVEN
        self._asked_back: set[SampleKey] = set()
        self._on_the_way: set[SampleKey] = set()  # jobs that move from one generator to another

    @property
    def waiting(self) -> int:
        """The number of jobs that no generator has."""
        return len(self._board.waiting)

    @property
    def wakes_at(self) -> float:
        """When the next turn has to come at the latest."""
        return self._board.now if self.has_more else self._policy.wakes_at

    @property
    def given(self) -> int:
        """The number of jobs that generators have."""
        return len(self._home)

    @property
    def generators(self) -> Sequence[str]:
        """The names of the generators."""
        return list(self._board.generators)

    def works(self, name: str) -> bool:
        """Whether a generator has any job."""
        return bool(self._board.generators[name].running)

    def is_done(self, group: int, size: int) -> bool:
        """Whether all samples of a group are done."""
        known = self._groups.get(group)
        return known is not None and len(known.done) >= size

    def admit(self, jobs: Iterable[SampleJob], now: float) -> None:
        """Add jobs, except those that are known already."""
        self._board.now = max(self._board.now, now)
        with _collector_at_rest():
            self._admit([job for job in jobs if self._is_fresh(job)], now)

    def _admit(self, fresh: Sequence[SampleJob], now: float) -> None:
        if not fresh:
            return
        if self._policy.group_beliefs is not None:
            self._policy.group_beliefs.admitted(fresh)
        # nothing is known of these jobs yet but their predictions
        self._board.waiting.add_all([(job.prompt.predicted, job.key, job) for job in fresh])
        self._policy.admitted(self._board, fresh, now)
        self._ask_all = True

    def _is_fresh(self, job: SampleJob) -> bool:
        """Note that a job's group is admitted. Return whether the job is neither done, given nor waiting."""
        key = group, index = job.key
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _AdmittedGroup()
        if index >= known.count:
            known.count = index + 1
        return index not in known.done and key not in self._home and key not in self._board.waiting

    def _wait(self, jobs: Iterable[SampleJob]) -> None:
        if (group_beliefs := self._policy.group_beliefs) is None:
            self._board.waiting.add_all([(job.prompt.predicted, job.key, job) for job in jobs])
        else:
            self._board.waiting.add_all([(group_beliefs.expected_length(job), job.key, job) for job in jobs])

    def forget(self, groups: Collection[int]) -> None:
        """Drop all jobs of these groups, whether they wait, run or are done."""
        for group in groups:
            known = self._groups.pop(group, None)
            for index in range(known.count if known is not None else 0):
                key = group, index
                if key in self._board.waiting:
                    self._let_go(self._board.waiting.remove(key))
                elif (lost := self._take_from_home(key)) is not None:
                    self._let_go(lost)
                    self._ask_all = True

    def _let_go(self, job: SampleJob) -> None:
        if self._policy.group_beliefs is not None:
            self._policy.group_beliefs.forget(job)

    def _take_from_home(self, key: SampleKey) -> SampleJob | None:
        """Remove a job from the generator that has it, and return it; None if no generator has it."""
        self._asked_back.discard(key)
        self._on_the_way.discard(key)
        if (found := self._board.end(key)) is None:
            return None
        generator, job = found
        self._ask.add(generator.name)
        return job

    def join(
        self, name: str, slots: int, seconds: np.ndarray, now: float, *, keeps_bits: bool = False
    ) -> None:
        """Add a generator. A known one is taken to have started anew, so its jobs wait again.

        `keeps_bits`: whether a sample that it continues for another one has the same bits.
        """
        self._put_back(name)
        self._board.now = max(self._board.now, now)
        self._board.generators[name] = BoardGenerator(name, slots, seconds, now, keeps_bits=keeps_bits)
        self._board.regrouped(name)
        self._regrouped(now)

    def adopt(self, name: str, keys: Iterable[SampleKey]) -> None:
        """Note that a generator has waiting jobs: from an earlier dispatcher, or from before its silence."""
        generator = self._board.generators[name]
        for key in keys:
            if key in self._board.waiting:
                self._board.start(generator, self._board.waiting.remove(key))

    def delayed(self, name: str, round_s: float) -> None:
        """Set how long it takes from a generator's finished sample until a job for its slot can begin."""
        self._board.generators[name].round_s = round_s

    def measured(self, name: str, seconds: np.ndarray, now: float) -> None:
        """Set how long a generator's steps take."""
        generator = self._board.generators[name]
        generator.advance(now)
        generator.seconds = seconds
        self._board.regrouped(name)

    def handed_over(self, name: str, parts: Mapping[SampleKey, tuple[Part, int]]) -> None:
        """Add to jobs of a leaving generator the tokens that it made, with their offsets on `<run>.parts`."""
        generator = self._board.generators.get(name)
        for key, (part, at) in parts.items():
            if generator is not None and key in generator.running:
                generator.running[key] = replace(generator.running[key], part=part, part_at=at)

    def leave(self, name: str, now: float) -> int:
        """Remove a generator; its jobs wait again. Return how many these were."""
        lost = self._put_back(name)
        if self._board.generators.pop(name, None) is not None:
            self._board.regrouped(name)
            self._regrouped(now)
        return lost

    @property
    def _is_alone(self) -> bool:
        return len(self._board.generators) == 1 and self._latency_s > 0

    def _regrouped(self, now: float) -> None:
        if len(self._board.generators) <= 2:  # with more of them none was alone, and none is
            for generator in self._board.generators.values():
                generator.ahead = ALONE if self._is_alone else 0
                self._board.changed(generator.name)
        self._policy.regrouped(self._board, now)
        self._ask_all = True

    def withdraw(self) -> dict[str, list[SampleKey]]:
        """Return jobs to ask back, by generator: those that it can't begin soon, if another one has room.

        Of a generator's jobs, the last in order of work are asked back.
        """
        excess: dict[str, list[SampleKey]] = {}
        if len(self._board.generators) < 2 or self._board.waiting or self._board.emptiest() is None:
            return excess
        for generator in self._board.overfull():
            count = -generator.free
            if sum(key in self._asked_back for key in generator.running) >= count:
                continue
            ordered = sorted(generator.running.values(), key=lambda job: job.order_key)
            fresh = [job.key for job in ordered[-count:] if job.key not in self._asked_back]
            self._asked_back.update(fresh)
            if fresh:
                excess[generator.name] = fresh
        return excess

    def returned(self, name: str, keys: Iterable[SampleKey], now: float) -> None:
        """Take back withdrawn jobs that the generator had not begun; they wait again."""
        back = []
        for key in keys:
            self._asked_back.discard(key)
            if self._home.get(key) == name and (job := self._take_from_home(key)) is not None:
                back.append(job)
        if back:
            self._wait(back)
            self._policy.admitted(self._board, back, now)
            self._ask_all = True

    def _put_back(self, name: str) -> int:
        generator = self._board.generators.get(name)
        if generator is None:
            return 0
        jobs = generator.clear()
        for job in jobs:
            self._home.pop(job.key, None)
            self._asked_back.discard(job.key)
            self._on_the_way.discard(job.key)
        self._wait(jobs)
        self._board.changed(name)
        return len(jobs)

    def finished(self, key: SampleKey, length: int, now: float) -> None:
        """Note that a sample is done, by any generator: one that was thought lost may still arrive.

        A sample of a group that is not admitted is ignored: anyone could have made it up.
        """
        if (known := self._groups.get(key[0])) is None:
            return
        self._board.now = max(self._board.now, now)
        known.done.add(key[1])
        if key in self._board.waiting:
            self._learn(self._board.waiting.remove(key), length)
            return
        if (found := self._board.end(key)) is None:
            return
        generator, job = found
        self._asked_back.discard(key)
        self._on_the_way.discard(key)
        generator.ended(length)
        self._policy.finished(self._board, generator, job, length, now)
        self._learn(job, length)
        self._free(generator)

    def _free(self, generator: BoardGenerator) -> None:
        """Ask for jobs for the free slot, and for those that it can begin before it hears from us."""
        if self._latency_s:
            latency_s = max(self._latency_s, _BUNCHES * generator.round_s)
            ends = min(latency_s / generator.answer_s, _MOST_AHEAD)  # of a full slot, in that time
            soon = 1 + round(generator.slots * ends)
            generator.ahead = max(ALONE, soon) if self._is_alone else soon
        if not self._is_alone or generator.free >= ALONE // 4:
            self._ask.add(generator.name)

    def _learn(self, job: SampleJob, length: int) -> None:
        if (group_beliefs := self._policy.group_beliefs) is None:
            return
        # while no job waits, none is dealt by the lengths of running ones, and a choice corrects them anyway
        is_used = self._policy.by_deadline and bool(self._board.waiting)
        of_running = is_used and len(self._home) <= _LOOKED_AT_EACH
        if keys := group_beliefs.finished(self._board, job, length, of_running=of_running):
            self._policy.corrected(self._board, keys)

    def again(self, job: SampleJob, now: float) -> None:
        """Have a job made again, even if a generator is at it: its sample could not be used."""
        self._take_from_home(job.key)
        self._groups.setdefault(job.prompt.group, _AdmittedGroup()).done.discard(job.index)
        self.admit([job], now)

    def progress(self, name: str, tokens: Mapping[SampleKey, int], now: float) -> None:
        """Set how many tokens a generator's running jobs have, as reported."""
        if generator := self._board.generators.get(name):
            generator.advance(now)
            for key, count in tokens.items():
                generator.correct(key, count)

    def moved(self, now: float) -> list[tuple[SampleJob, str, str]]:
        """Move running jobs as the dispatch policy wants.

        Return each job, its source and target; report `arrived`.
        """
        moves, board = [], self._board
        board.now = max(board.now, now)
        for key, target in self._policy.take_moves():
            name = self._home.get(key)
            if name is None or name == target or target not in board.generators or key in self._on_the_way:
                continue
            self._on_the_way.add(key)
            source = board.generators[name]
            source.advance(board.now)
            tokens = source.tokens(key)
            found = board.end(key)
            assert found is not None
            board.start(board.generators[target], found[1], tokens)
            self._ask.add(name)
            moves.append((found[1], name, target))
        if moves:
            self._policy.moved(board)
        return moves

    def arrived(self, key: SampleKey) -> None:
        """Note that a moved job has reached its new generator."""
        self._on_the_way.discard(key)

    def turn(self, now: float) -> dict[str, list[SampleJob]]:
        """Fill free slots as the dispatch policy decides. Return the given jobs by generator."""
        given: dict[str, list[SampleJob]] = {}
        board = self._board
        self.has_more = False
        if not board.generators:
            return given
        board.now = max(board.now, now)
        if self._policy.tick(board, now):
            self._ask_all = True
        asked = self._asked()
        was_all, self._ask_all = self._ask_all, False
        self._ask.clear()
        if not asked and self._is_alone:
            return given  # the only generator has enough for now
        for count, (generator, key) in enumerate(self._policy.fill(board, asked, now), 1):
            job = board.waiting.remove(key)
            board.start(generator, job)
            given.setdefault(generator.name, []).append(job)
            if count == self._most:
                self.has_more, self._ask_all = True, was_all
                self._ask.update(one.name for one in asked)
                break
        self._most = min(2 * self._most, _MOST_GIVEN) if self.has_more else _FIRST_GIVEN
        if board.waiting and not self._home:
            raise AssertionError("jobs wait, and the dispatch policy gave none to any generator")
        return given

    def _asked(self) -> list[BoardGenerator]:
        """Return the generators whose free slots are to be filled, the fastest first."""
        board = self._board
        if self._ask_all:
            return [generator for generator in board.fastest_first if generator.free > 0]
        known = [board.generators[name] for name in self._ask if name in board.generators]
        free = [generator for generator in known if generator.free > 0]
        return sorted(free, key=speed_order) if len(free) > 1 else free
