"""Runs the dispatcher in a thread of the feeder: connects it to Kafka and follows the generators.

feeder ── admitted prompts ──►┐
<run>.samples   (who is done) ├─► dispatcher ──► <run>.assignments, keyed by generator
<run>.instances (who is there)┤
<run>.dead      (to be redone)┤
<run>.parts     (who moves)   ┘

It stores no state: started again, it learns from the log which samples are done, and asks all generators for
a full report before it gives any job. It keeps only prompts that are admitted and not trained.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from infra.background import Background
from infra.bus import Record, ends_of
from infra.gate import Gate
from infra.roles.context import RoleContext
from infra.tail import Tail
from producers.dispatch.assigning import assignments, question
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.fleet import Fleet
from producers.dispatch.jobs import Placed, RecordPlace, SampleJob
from producers.dispatch.leaving import Leaving
from producers.dispatch.on_the_way import GeneratorStart, Moves
from producers.dispatch.policies.policy import policy_of
from producers.dispatch.recovery import Past, SampleDeadLetters, lengths_before
from schemas.identity import SampleKey, sample_key
from schemas.messages import TRAIN, Assignment, GeneratorReport, Part, Prompt
from schemas.topics import ASSIGNMENT_PARTITIONS, Topic, assignment_partition
from schemas.wire import MessageT, encode

_TICK_S = 0.1
_PARTS_S = 2.0  # time for the parts of a generator that leaves to come
_ANSWER_S = 1.5  # time for generators to report what they have
LATENCY_S = 0.15  # from a finished sample to the start of the next one, at least: so much is given ahead


class FinishedSample(NamedTuple):
    """A sample that is done, and where it stands on the topic."""

    key: SampleKey
    length: int
    place: RecordPlace
    generator: str
    finished_at: float


class FinishedSource(Protocol):
    """A source of finished samples."""

    bell: threading.Event  # rung when some came

    def take(self) -> list[FinishedSample]:
        """Return the samples that came since the last call."""


class Dispatching:
    """A thread that dispatches until it is closed."""

    def __init__(
        self, context: RoleContext, known: Sequence[Placed], past: Past, samples: FinishedSource
    ) -> None:
        """`known`: open prompts on the topic. `samples`: gives the fit samples of admitted groups."""
        self._context, self._past = context, past
        self._policy = policy_of(context.spec)
        self._dispatcher = Dispatcher(self._policy, latency_s=LATENCY_S)
        spec, now = context.spec, time.monotonic()
        self._fleet = Fleet(
            self._dispatcher, context.log, slots=spec.generator.slots, silence_s=spec.dispatch.silence_s,
            now=now,
        )  # fmt: skip
        self._moves = Moves(spec.dispatch.silence_s)
        self._arrived: list[tuple[GeneratorStart, SampleJob]] = []  # jobs whose moves are over
        self._leaving = Leaving(min(_PARTS_S, spec.dispatch.silence_s / 2))  # before it counts as silent
        self._trained: tuple[int, Collection[int] | None] = past.trained, None
        self._forgotten = past.trained
        self._epoch = int(getattr(context, "feeder_epoch", 0))
        self._bell = threading.Event()
        self._prompts: queue.SimpleQueue[Sequence[Placed]] = queue.SimpleQueue()
        self._open: dict[int, Placed] = {}  # by group, until trained: any of its samples may turn out unfit
        self._unfit = past.unfit
        self._rule = self._policy.words()[0]
        self._closed = threading.Event()
        self._thread = Background(self._run, "dispatch")
        self.admit(known)
        samples.bell = self._bell
        self._samples = samples

    def open(self) -> Dispatching:
        """Follow the topics, ask all generators for their samples, and start the thread. Return itself."""
        bus, topics = self._context.bus, self._context.topics
        if (group_beliefs := self._policy.group_beliefs) is not None:
            group_beliefs.beliefs.observe(lengths_before(self._context))
        letters = SampleDeadLetters(self._context)
        dead = bus.reader(topics.dead, {0: self._past.letters}, patient=True)
        self._letters = Tail(dead, letters.take, self._bell).open()
        self._reports = self._follow(GeneratorReport, topics.generators)
        self._parts = self._follow(Part, topics.parts)
        resumed = any(ends_of(bus, topics.assignments).values())
        self._ask_everyone()
        # generators with jobs of an earlier dispatcher need time to report them
        self._open_at = time.monotonic() + (_ANSWER_S if resumed else 0.0)
        self._thread.start()
        return self

    def _follow(self, kind: type[MessageT], topic: Topic) -> Tail[tuple[Record, MessageT]]:
        """Follow a topic from its present end. A record that can't be read becomes a dead letter."""
        gate = Gate(kind, self._context.run, self._context.dead_letter)
        reader = self._context.bus.reader(topic, ends_of(self._context.bus, topic), patient=True)
        return Tail(reader, lambda records: list(gate.take(records)), self._bell).open()

    def admit(self, prompts: Sequence[Placed]) -> None:
        """Add prompts that are on `<run>.prompts`."""
        if prompts:
            self._prompts.put(prompts)
            self._bell.set()

    def trained(self, iterations: int, evaluating: Collection[int] | None = None) -> None:
        """Note how many iterations are trained: their remaining jobs are dropped.

        `evaluating`: versions whose evaluations are open; None: those of which a sample is not done.
        """
        self._trained = iterations, evaluating

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        self._thread.check()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._bell.set()
        self._thread.join()
        for tail in (self._reports, self._letters, self._parts):
            tail.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._bell.wait(_TICK_S)
            self._bell.clear()
            self._turn(time.monotonic())

    def _turn(self, now: float) -> None:
        self._take_prompts(now)
        self._take_samples(now)
        for _, report in self._reports.take():
            if report.leaving and report.handed and self._fleet.is_there((report.generator, report.start)):
                self._leaving.reported(report, now)
                continue
            self._fleet.heard(report, now)
            for name in report.returned:
                self._moves.returned(sample_key(name), (report.generator, report.start))
        self._take_parts(now)
        for report, parts in self._leaving.gone(now):
            self._dispatcher.handed_over(report.generator, parts)
            self._fleet.heard(report, now)
        self._fleet.bury_the_silent(now)
        self._leaving.keep(self._fleet.is_known, now)
        self._forget()
        if now >= self._open_at:
            given = self._dispatcher.turn(now)
            withdrawn = self._dispatcher.withdraw()
            moving = self._move(given, now)
            for name in {*given, *withdrawn, *moving}:
                self._assign(name, given.get(name, []), withdrawn.get(name, []), moving.get(name, []))
            if self._dispatcher.has_more:
                self._bell.set()
        self._ask_strangers()
        self._count()

    def _take_prompts(self, now: float) -> None:
        while not self._prompts.empty():
            prompts = [one for one in self._prompts.get() if self._is_wanted(one.prompt)]
            self._open |= {one.prompt.group: one for one in prompts}
            jobs = [_job(one, index) for one in prompts for index in range(one.prompt.size)]
            self._dispatcher.admit(jobs, now)
            for job in jobs:  # beliefs of the rest of its group are corrected
                if (length := self._past.done.pop(job.key, None)) is not None:
                    self._dispatcher.finished(job.key, length, now)
        self._past.done.clear()  # the remaining ones are of groups that are not admitted

    def _is_wanted(self, prompt: Prompt) -> bool:
        return prompt.purpose != TRAIN or prompt.iteration >= self._forgotten

    def _take_samples(self, now: float) -> None:
        letters = self._letters.take()  # before the samples: letters may be about those that come now
        self._unfit |= {letter.place for letter in letters}
        seen: dict[int, int] = {}
        clock = time.time()
        for one in self._samples.take():  # before the reports: else done jobs are given again
            seen[one.place.partition] = one.place.offset
            if one.place not in self._unfit:
                self._fleet.finished(one.generator, clock - one.finished_at)
                self._dispatcher.finished(one.key, one.length, now)
                self._moves.finished(one.key)
        self._unfit = {place for place in self._unfit if place.offset > seen.get(place.partition, -1)}
        for letter in letters:
            self._make_again(letter.wanted, now)

    def _make_again(self, name: str, now: float) -> None:
        if not name:
            return
        group, index = sample_key(name)
        known = self._open.get(group)
        if known is not None and 0 <= index < known.prompt.size:
            self._context.log.warning("sample %s was not fit to be used: it is made again", name)
            counters = self._context.heart.counters
            counters["made_again"] = counters.get("made_again", 0) + 1
            self._dispatcher.again(_job(known, index), now)

    def _forget(self) -> None:
        """Drop the jobs of trained iterations and of finished evaluations."""
        trained, evaluating = self._trained
        if trained == self._forgotten:
            return
        self._forgotten = trained
        gone = {
            group
            for group, (prompt, _) in self._open.items()
            if prompt.iteration < trained
            and (prompt.purpose == TRAIN or self._is_evaluated(prompt, trained, evaluating))
        }
        self._open = {group: one for group, one in self._open.items() if group not in gone}
        self._dispatcher.forget(gone)

    def _is_evaluated(self, prompt: Prompt, trained: int, evaluating: Collection[int] | None) -> bool:
        if evaluating is not None:
            return prompt.iteration not in evaluating
        most_stale = self._context.spec.algorithm.most_stale
        soon = int(most_stale) if math.isfinite(most_stale) else 0  # until then one may be found unfit
        return prompt.iteration < trained - 1 - soon and self._dispatcher.is_done(prompt.group, prompt.size)

    def _take_parts(self, now: float) -> None:
        """Take the parts that have come: of moves, and of generators that leave."""
        for record, part in self._parts.take():
            if (found := self._moves.arrived(part, record.offset)) is not None:
                self._arrived.append(found)
            else:
                self._leaving.arrived(part, record.offset, now)

    def _move(self, given: dict[str, list[SampleJob]], now: float) -> dict[str, list[SampleKey]]:
        """Begin moves.

        Return the samples that generators shall hand over; jobs of moves that arrived go into `given`.
        """
        moving: dict[str, list[SampleKey]] = {}
        for job, source, target in self._dispatcher.moved(now):
            self._moves.begin(job, self._fleet.process(source), self._fleet.process(target), now)
            moving.setdefault(source, []).append(job.key)
        arrived, self._arrived = self._arrived, []
        for process, job in arrived + self._moves.lost(self._fleet.is_there, now):
            self._dispatcher.arrived(job.key)
            if self._fleet.is_there(process):  # else the job waits again with all others of the target
                given.setdefault(process[0], []).append(job)
        return moving

    def _assign(
        self,
        name: str,
        jobs: Sequence[SampleJob],
        withdrawn: Sequence[SampleKey],
        moving: Sequence[SampleKey],
    ) -> None:
        process, run = self._fleet.process(name), self._context.run
        for message in assignments(run, process, jobs, withdrawn, moving, epoch=self._epoch):
            self._send(message, assignment_partition(name))

    def _ask_everyone(self) -> None:
        for partition in range(ASSIGNMENT_PARTITIONS):
            self._send(question(self._context.run, epoch=self._epoch), partition)

    def _ask_strangers(self) -> None:
        for process in self._fleet.strangers.items():
            self._send(
                question(self._context.run, process, epoch=self._epoch), assignment_partition(process[0])
            )
        self._fleet.strangers.clear()

    def _send(self, message: Assignment, partition: int) -> None:
        self._context.writer.send(
            self._context.topics.assignments, encode(message), key=message.generator, partition=partition
        )

    def _count(self) -> None:
        counters = self._context.heart.counters
        counters["undispatched"], counters["dispatched"] = self._dispatcher.waiting, self._dispatcher.given
        counters["generators"] = len(self._fleet)
        counters.update(self._policy.counters())
        rule, why = self._policy.words()
        if rule != self._rule:
            self._rule = rule
            self._context.log.info("samples are dispatched %s: %s", rule, why)


def _job(placed: Placed, index: int) -> SampleJob:
    return SampleJob(placed.prompt, index, place=placed.place)
