"""The dispatcher's core: decides which generator gets which job. It has no clock of its own and no Kafka.

admit, join, leave, finished, progress ──► board ──► turn(now) ──► (generator, jobs)
                                             ▲
                                           policy

It keeps only jobs that are admitted and not forgotten, so its memory does not grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from producers.dispatch.board import Board, BoardGenerator
from producers.dispatch.jobs import SampleJob
from producers.dispatch.policies.policy import Policy
from schemas.identity import SampleKey

# The only generator gets so many jobs beyond its slots: then it never waits for us, and one that joins still
# finds most of the work not given away. It gets more when a quarter of them is begun.
ALONE = 1024


class Dispatcher:
    """Gives each job to one generator; the jobs of a generator that is lost are given again."""

    def __init__(self, policy: Policy, *, latency_s: float = 0.0) -> None:
        """`latency_s`: seconds until a generator can begin a job that it is given."""
        self._policy, self._board, self._latency_s = policy, Board(), latency_s
        self._done: dict[int, set[int]] = {}  # by admitted group: indexes of its done samples
        self._home = self._board.home
        self._ask: set[str] = set()  # generators with slots that have become free
        self._ask_all = False
        self._asked_back: set[SampleKey] = set()
        self._on_the_way: set[SampleKey] = set()  # jobs that move from one generator to another

    @property
    def waiting(self) -> int:
        """The number of jobs that no generator has."""
        return len(self._board.waiting)

    @property
    def wakes_at(self) -> float:
        """When the next turn has to come at the latest."""
        return self._policy.wakes_at

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
        return len(self._done.get(group, ())) >= size

    def admit(self, jobs: Iterable[SampleJob], now: float) -> None:
        """Add jobs, except those that are known already."""
        fresh = []
        for job in jobs:
            done = self._done.setdefault(job.prompt.group, set())
            if job.index not in done and job.key not in self._home and job.key not in self._board.waiting:
                fresh.append(job)
        if fresh and self._policy.group_beliefs is not None:
            self._policy.group_beliefs.admitted(fresh)
        for job in fresh:
            self._wait(job)
        if fresh:
            self._policy.admitted(self._board, fresh, now)
            self._ask_all = True

    def _wait(self, job: SampleJob) -> None:
        group_beliefs = self._policy.group_beliefs
        self._board.waiting.add(
            job, job.prompt.predicted if group_beliefs is None else group_beliefs.expected_length(job)
        )

    def forget(self, groups: Collection[int]) -> None:
        """Drop all jobs of these groups, whether they wait, run or are done."""
        for job in [job for job, _ in self._board.waiting if job.prompt.group in groups]:
            self._board.waiting.remove(job.key)
            self._let_go(job)
        for key in [key for key in self._home if key[0] in groups]:
            if (lost := self._take_from_home(key)) is not None:
                self._let_go(lost)
            self._ask_all = True
        for group in groups:
            self._done.pop(group, None)

    def _let_go(self, job: SampleJob) -> None:
        if self._policy.group_beliefs is not None:
            self._policy.group_beliefs.forget(job)

    def _take_from_home(self, key: SampleKey) -> SampleJob | None:
        """Remove a job from the generator that has it, and return it; None if no generator has it."""
        self._asked_back.discard(key)
        self._on_the_way.discard(key)
        if (name := self._home.pop(key, None)) is None:
            return None
        self._ask.add(name)
        return self._board.generators[name].end(key)

    def join(self, name: str, slots: int, seconds: np.ndarray, now: float) -> None:
        """Add a generator. A known one is taken to have started anew, so its jobs wait again."""
        self._put_back(name)
        self._board.generators[name] = BoardGenerator(name, slots, seconds, now)
        self._board.regrouped()
        self._regrouped(now)

    def adopt(self, name: str, keys: Iterable[SampleKey]) -> None:
        """Note that a generator has waiting jobs: from an earlier dispatcher, or from before its silence."""
        generator = self._board.generators[name]
        for key in keys:
            if key in self._board.waiting:
                generator.start(self._board.waiting.remove(key))
                self._home[key] = name

    def measured(self, name: str, seconds: np.ndarray, now: float) -> None:
        """Set how long a generator's steps take."""
        generator = self._board.generators[name]
        generator.advance(now)
        generator.seconds = seconds
        self._board.regrouped()

    def leave(self, name: str, now: float) -> int:
        """Remove a generator; its jobs wait again. Return how many these were."""
        lost = self._put_back(name)
        if self._board.generators.pop(name, None) is not None:
            self._board.regrouped()
            self._regrouped(now)
        return lost

    @property
    def _is_alone(self) -> bool:
        return len(self._board.generators) == 1 and self._latency_s > 0

    def _regrouped(self, now: float) -> None:
        for generator in self._board.generators.values():
            generator.ahead = ALONE if self._is_alone else 0
        self._policy.regrouped(self._board, now)
        self._ask_all = True

    def withdraw(self) -> dict[str, list[SampleKey]]:
        """Return jobs to ask back, by generator: those that it can't begin soon, if another one has room.

        Of a generator's jobs, the last in order of work are asked back.
        """
        excess: dict[str, list[SampleKey]] = {}
        if len(self._board.generators) < 2 or self._board.waiting:
            return excess
        if not any(generator.free > 0 for generator in self._board.generators.values()):
            return excess
        for name, generator in self._board.generators.items():
            if (count := -generator.free) > 0:
                ordered = sorted(generator.running.values(), key=lambda job: job.order_key)
                fresh = [job.key for job in ordered[-count:] if job.key not in self._asked_back]
                self._asked_back.update(fresh)
                if fresh:
                    excess[name] = fresh
        return excess

    def returned(self, name: str, keys: Iterable[SampleKey], now: float) -> None:
        """Take back withdrawn jobs that the generator had not begun; they wait again."""
        back = []
        for key in keys:
            self._asked_back.discard(key)
            if self._home.get(key) == name and (job := self._take_from_home(key)) is not None:
                self._wait(job)
                back.append(job)
        if back:
            self._policy.admitted(self._board, back, now)
            self._ask_all = True

    def _put_back(self, name: str) -> int:
        generator = self._board.generators.get(name)
        if generator is None:
            return 0
        for key, job in generator.running.items():
            self._home.pop(key, None)
            self._asked_back.discard(key)
            self._on_the_way.discard(key)
            self._wait(job)
        lost = len(generator.running)
        generator.running.clear()
        return lost

    def finished(self, key: SampleKey, length: int, now: float) -> None:
        """Note that a sample is done, by any generator: one that was thought lost may still arrive.

        A sample of a group that is not admitted is ignored: anyone could have made it up.
        """
        if (done := self._done.get(key[0])) is None:
            return
        done.add(key[1])
        if key in self._board.waiting:
            self._learn(self._board.waiting.remove(key), length)
            return
        if (name := self._home.pop(key, None)) is None:
            return
        self._asked_back.discard(key)
        self._on_the_way.discard(key)
        generator = self._board.generators[name]
        generator.advance(now)
        job = generator.end(key)
        assert job is not None
        self._policy.finished(self._board, generator, job, length, now)
        self._learn(job, length)
        self._free(generator, now)

    def _free(self, generator: BoardGenerator, now: float) -> None:
        """Ask for jobs for the free slot, and for those that it can begin before it hears from us."""
        if self._latency_s:
            soon = 1 + round(generator.rate(now) * self._latency_s)
            generator.ahead = max(ALONE, soon) if self._is_alone else soon
        if not self._is_alone or generator.free >= ALONE // 4:
            self._ask.add(generator.name)

    def _learn(self, job: SampleJob, length: int) -> None:
        if (group_beliefs := self._policy.group_beliefs) is None:
            return
        if keys := group_beliefs.finished(self._board, job, length, of_running=self._policy.by_deadline):
            self._policy.corrected(self._board, keys)

    def again(self, job: SampleJob, now: float) -> None:
        """Have a job made again, even if a generator is at it: its sample could not be used."""
        self._take_from_home(job.key)
        self._done.setdefault(job.prompt.group, set()).discard(job.index)
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
        moves = []
        for key, target in self._policy.take_moves():
            source = self._home.get(key)
            if source is None or source == target or target not in self._board.generators:
                continue
            if key in self._on_the_way:
                continue
            self._on_the_way.add(key)
            generator = self._board.generators[source]
            tokens = generator.tokens(key)
            job = generator.end(key)
            assert job is not None
            self._board.generators[target].start(job, tokens)
            self._home[key] = target
            self._ask.add(source)
            moves.append((job, source, target))
        if moves:
            self._policy.moved(self._board)
        return moves

    def arrived(self, key: SampleKey) -> None:
        """Note that a moved job has reached its new generator."""
        self._on_the_way.discard(key)

    def turn(self, now: float) -> dict[str, list[SampleJob]]:
        """Fill free slots as the dispatch policy decides. Return the given jobs by generator."""
        given: dict[str, list[SampleJob]] = {}
        board = self._board
        if not board.generators:
            return given
        for generator in board.generators.values():
            generator.advance(now)
        if self._policy.tick(board, now):
            self._ask_all = True
        asked = board.fastest_first
        if not self._ask_all:
            asked = [generator for generator in asked if generator.name in self._ask]
        asked = [generator for generator in asked if generator.free > 0]
        self._ask_all = False
        self._ask.clear()
        if not asked and self._is_alone:
            return given  # the only generator has enough for now
        for generator, key in self._policy.fill(board, asked, now):
            job = board.waiting.remove(key)
            self._home[key] = generator.name
            generator.start(job)
            given.setdefault(generator.name, []).append(job)
        if board.waiting and not any(generator.running for generator in board.generators.values()):
            raise AssertionError("jobs wait, and the dispatch policy gave none to any generator")
        return given
