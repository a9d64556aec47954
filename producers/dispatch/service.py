"""The dispatcher beside the feeder: who is there, who is silent, who gets what.

feeder ── admitted prompts ──►┐
<run>.samples   (who is done) ├─► dispatcher ──► <run>.assignments, keyed by instance
<run>.instances (who is there)┤
<run>.dead      (to be redone)┤
<run>.parts     (who moves)   ┘

It keeps no state of its own: started again, it learns from the log what is done and from the instances' next
reports what they have; only then it gives anything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from infra.bus import Record, ends_of
from infra.process import Context
from infra.tail import Tail
from producers.dispatch import REPORT_S
from producers.dispatch.algorithm2 import Algorithm2
from producers.dispatch.beliefs import Beliefs
from producers.dispatch.curve import CurveError, LatencyCurve, curve_of, flat
from producers.dispatch.deadline import DeadlinePolicy
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.on_the_way import Moves, Process
from producers.dispatch.policies import LongestFirst, Policy, RandomFifo, RoundRobin
from producers.dispatch.ranks import Ranks
from producers.dispatch.recovery import Past, Place, unfit_sample
from producers.jobs import Job, Key
from schemas.identity import sample_id, sample_key
from schemas.messages import TRAIN, Assignment, InstanceReport, Part, Prompt, Sample
from schemas.runspec import RunSpec
from schemas.topics import assignment_partition
from schemas.wire import Unreadable, decode, encode

OfRun = TypeVar("OfRun", InstanceReport, Part)

_TICK_S = 0.1
_LEFT_OUT_S = 20.0
_LATENCY_S = 0.15  # from a finished sample to the next one's start: so much work is given ahead


def policy_of(spec: RunSpec) -> Policy:
    """The policy that the run file names."""
    name = spec.dispatch.policy
    if name == "deadline":
        ranks = Ranks(Beliefs(spec.sampling.max_tokens))
        speed = spec.dispatch.prefill_tokens_per_s
        move_s = None if speed is None else 1 / speed
        return DeadlinePolicy(ranks, seed=spec.seed, replans=8, thrift=0.02, move_s=move_s)
    if name == "longest_first":
        return LongestFirst()
    if name == "round_robin":
        return RoundRobin()
    return Algorithm2() if name == "algorithm2" else RandomFifo(spec.seed)


@dataclass
class _Instance:
    start: str
    heard_at: float
    curve: LatencyCurve
    silent_s: float = 0.0
    idle_s: float = 0.0  # while others had work


class Dispatching:
    """A thread that dispatches until it is closed."""

    def __init__(self, context: Context, known: Sequence[Prompt], past: Past) -> None:
        self._context, self._past = context, past
        self._dispatcher = Dispatcher(policy_of(context.spec), latency_s=_LATENCY_S)
        self._silence_s = context.spec.dispatch.silence_s
        self._instances: dict[str, _Instance] = {}
        self._moves = Moves(self._silence_s)
        self._former: set[tuple[str, str]] = set()  # name and start of processes that were replaced
        self._turned_at = time.monotonic()
        self._trained = self._forgotten = past.trained
        self._bell = threading.Event()
        self._prompts: queue.SimpleQueue[Sequence[Prompt]] = queue.SimpleQueue()
        self._open: dict[int, Prompt] = {}  # by group, until it is trained: of any a sample may be unfit
        self._unfit = past.unfit
        bus, topics = context.bus, context.topics
        ends = ends_of(bus, topics.instances)
        resumed = any(ends_of(bus, topics.assignments).values())
        # instances that have work from the dispatcher before this one must have the time to say so
        self._open_at = time.monotonic() + (3 * REPORT_S if resumed else 0.0)
        self.admit([prompt for prompt in known if prompt.purpose != TRAIN or prompt.window >= past.trained])
        self._samples = Tail(bus.reader(topics.samples, past.positions), self._finished, self._bell)
        self._reports = Tail(bus.reader(topics.instances, ends), self._readable(InstanceReport), self._bell)
        self._letters = Tail(bus.reader(topics.dead, {0: past.letters}), self._unfit_samples, self._bell)
        parts = bus.reader(topics.parts, ends_of(bus, topics.parts))
        self._parts = Tail(parts, self._readable(Part), self._bell)
        self._failure: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="dispatch")
        self._thread.start()

    def admit(self, prompts: Sequence[Prompt]) -> None:
        """Prompts that stand on `<run>.prompts`."""
        if prompts:
            self._prompts.put(prompts)
            self._bell.set()

    def trained(self, iterations: int) -> None:
        """So many iterations are trained: nobody needs what is left of them."""
        self._trained = iterations

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._bell.set()
        self._thread.join()
        self._samples.close()
        self._reports.close()
        self._letters.close()
        self._parts.close()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._bell.wait(_TICK_S)
                self._bell.clear()
                self._turn(time.monotonic())
        except Exception as error:  # whatever it is: the feeder's own thread raises it
            self._failure = error

    def _turn(self, now: float) -> None:
        while not self._prompts.empty():
            prompts = self._prompts.get()
            self._open |= {prompt.group: prompt for prompt in prompts}
            jobs = [Job(prompt, index) for prompt in prompts for index in range(prompt.size)]
            self._dispatcher.admit(jobs, now)
            for job in jobs:  # what was done before this process began tells of what is left of its group
                if (length := self._past.done.pop(job.key, None)) is not None:
                    self._dispatcher.finished(job.key, length, now)
        letters = self._letters.take()  # before the samples: these may be of those that come only now
        self._unfit |= {place for place, _ in letters}
        for key, length, place in self._samples.take():  # before the reports: what is done is not given again
            if place not in self._unfit:
                self._dispatcher.finished(key, length, now)
                self._moves.finished(key)
        for _, name in letters:
            self._make_again(name, now)
        for report in self._reports.take():
            self._heard(report, now)
        self._bury_the_silent(now)
        if self._trained > self._forgotten:
            self._forgotten = trained = self._trained
            self._open = {group: prompt for group, prompt in self._open.items() if prompt.window >= trained}
            self._dispatcher.forget(lambda job: job.prompt.purpose == TRAIN and job.prompt.window < trained)
        if now >= self._open_at:
            given = self._dispatcher.turn(now)
            withdrawn = self._dispatcher.withdraw()
            moving = self._move(given, now)
            for name in {*given, *withdrawn, *moving}:
                self._send(name, given.get(name, []), withdrawn.get(name, []), moving.get(name, []))
        counters = self._context.heart.counters
        counters["undispatched"], counters["dispatched"] = self._dispatcher.waiting, self._dispatcher.given
        counters["instances"] = len(self._instances)

    def _make_again(self, name: str, now: float) -> None:
        if not name:
            return
        group, index = sample_key(name)
        if (prompt := self._open.get(group)) is not None:
            self._context.log.warning("sample %s was not fit to be used: it is made again", name)
            counters = self._context.heart.counters
            counters["made_again"] = counters.get("made_again", 0) + 1
            self._dispatcher.again(Job(prompt, index), now)

    def _move(self, given: dict[str, list[Job]], now: float) -> dict[str, list[Key]]:
        """What instances shall hand over; what was handed over is `given` to who goes on with it."""
        moving: dict[str, list[Key]] = {}
        for job, source, target in self._dispatcher.moved(now):
            self._moves.begin(job, self._process(source), self._process(target), now)
            moving.setdefault(source, []).append(job.key)
        arrived = [found for part in self._parts.take() if (found := self._moves.arrived(part))]
        for process, job in arrived + self._moves.lost(self._is_there, now):
            self._dispatcher.arrived(job.key)
            if self._is_there(process):  # else it waits with all that this one had
                given.setdefault(process[0], []).append(job)
        return moving

    def _process(self, name: str) -> Process:
        return name, self._instances[name].start

    def _is_there(self, process: Process) -> bool:
        known = self._instances.get(process[0])
        return known is not None and known.start == process[1]

    def _bury_the_silent(self, now: float) -> None:
        """Silence counts while others are heard: else the broker is away, or nobody could take over."""
        passed, self._turned_at = now - self._turned_at, now
        for name, instance in list(self._instances.items()):
            others = [i.heard_at for other, i in self._instances.items() if other != name]
            if others and now - max(others) < 2 * REPORT_S:
                instance.silent_s += min(passed, now - instance.heard_at)
            if instance.silent_s > self._silence_s:
                self._gone(name, f"was not heard of for {self._silence_s:g} s", now)

    def _heard(self, report: InstanceReport, now: float) -> None:
        name, known = report.instance, self._instances.get(report.instance)
        if (name, report.start) in self._former:
            return
        if report.leaving:
            if known is not None and known.start == report.start:
                self._former.add((name, report.start))
                self._gone(name, "leaves", now)
            return
        held = {
            (group, index): tokens
            for group, index, tokens in zip(
                report.groups.tolist(), report.indexes.tolist(), report.tokens.tolist(), strict=True
            )
        }
        if known is None or known.start != report.start:
            if known is not None:
                self._former.add((name, known.start))
            curve = self._curve(report, flat())
            self._instances[name] = _Instance(report.start, now, curve)
            self._dispatcher.join(name, report.slots, curve.table(report.slots), now)
            self._dispatcher.adopt(name, held)
            self._context.log.info(
                "%s is there: %d slots, it has %d samples to make", name, report.slots, len(held)
            )
        else:
            passed, known.heard_at, known.silent_s = now - known.heard_at, now, 0.0
            known.idle_s = known.idle_s + passed if self._dispatcher.given and not held else 0.0
            known.curve = self._curve(report, known.curve)
            self._dispatcher.measured(name, self._steps(known, report.slots), now)
        self._dispatcher.progress(name, {key: count for key, count in held.items() if count >= 0}, now)
        self._dispatcher.returned(name, [sample_key(name_) for name_ in report.returned], now)

    def _steps(self, instance: _Instance, slots: int) -> np.ndarray:
        """How long its steps take. One that was left out for long is thought to be as fast as any other:

        its measurements are old, and without work it has no others.
        """
        table = instance.curve.table(slots)
        if instance.idle_s > _LEFT_OUT_S:
            for other in self._instances.values():
                table = np.minimum(table, other.curve.table(slots))
        return table

    def _curve(self, report: InstanceReport, otherwise: LatencyCurve) -> LatencyCurve:
        if not report.batches:
            return otherwise
        try:
            return curve_of(report.batches, report.seconds)
        except CurveError as error:
            self._context.log.warning("%s reports a profile that can't be: %s", report.instance, error)
            return otherwise

    def _gone(self, name: str, why: str, now: float) -> None:
        del self._instances[name]
        lost = self._dispatcher.leave(name, now)
        self._context.log.info("%s %s: the %d samples that it had are given to others", name, why, lost)

    def _send(self, name: str, jobs: Sequence[Job], withdrawn: Sequence[Key], moving: Sequence[Key]) -> None:
        groups: dict[int, list[Job]] = {}
        for job in jobs:
            groups.setdefault(job.prompt.group, []).append(job)
        assignment = Assignment(
            run=self._context.run, instance=name, start=self._instances[name].start,
            prompts=[encode(group[0].prompt) for group in groups.values()],
            indexes=[[job.index for job in group] for group in groups.values()],
            withdrawn=[sample_id(*key) for key in withdrawn], moving=[sample_id(*key) for key in moving],
            parts=[encode(job.part) for job in jobs if job.part is not None], sent_at=time.time(),
        )  # fmt: skip
        self._context.writer.send(
            self._context.topics.assignments, encode(assignment), key=name,
            partition=assignment_partition(name),
        )  # fmt: skip

    def _unfit_samples(self, records: list[Record]) -> list[tuple[Place, str]]:
        found = (unfit_sample(record, self._context.topics.samples) for record in records)
        return [one for one in found if one is not None]

    def _finished(self, records: list[Record]) -> list[tuple[Key, int, Place]]:
        found = []
        for record in records:
            try:
                sample = decode(record.value, Sample)
            except Unreadable:
                continue  # the trainer reports it
            if sample.run == self._context.run:
                place = record.partition, record.offset
                found.append(((sample.group, sample.index), sample.true_length, place))
        return found

    def _readable(self, kind: type[OfRun]) -> Callable[[list[Record]], list[OfRun]]:
        """Takes this run's messages out of records; what can't be read goes to the dead letters."""

        def read(records: list[Record]) -> list[OfRun]:
            found = []
            for record in records:
                try:
                    message = decode(record.value, kind)
                except Unreadable as error:
                    self._context.dead_letter(record, str(error))
                    continue
                if message.run == self._context.run:
                    found.append(message)
            return found

        return read
