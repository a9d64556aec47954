"""The time that each side of a run takes for an iteration, if it never waits for the other.

<run>.ledger ── end of each iteration, seconds of computing ──►┐
<run>.status ── seconds of each process by cause, counters ───►┴─► IterationTimes

No time is taken from a clock on the wall, so bubbles are in none of them.

                training takes                              generating takes
sync      scores, gradients, steps: what can run while      the work of the busiest generator: the next
          generating goes on. Publishing can not.           iteration begins when all are done
async     all but the wait for samples: publishing and      the work of all by their number, as if no slot
          checkpoints hold up the next iteration, too       had been empty: an empty one is a wait
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.messages import WAIT, Heartbeat, StepRecord
from schemas.runspec import RunSpec

_TAIL, _INSTALL = "generating the long tail", "installing weights"
_DRAWS = ("generating", _TAIL)
_NO_WORK = ("starting", "ended")
_COMPUTES = ("training", "scoring", "stepping", "taking steps again")
_SILENT_S = 10.0  # a generator that was not heard of for so long is not there
_LATE_S = 5.0  # how long to wait for a heartbeat after an iteration's end
_POINTS = 512  # heartbeats of a process that are kept: those of some minutes
_PROCESSES = 8192


@dataclass(frozen=True)
class IterationTimes:
    """Both sides' seconds of one iteration."""

    iteration: int
    gen_s: float
    train_s: float
    generators: int
    more_s: float  # `gen_s` with one generator more, as estimated
    fewer_s: float  # with one fewer
    tokens: float


@dataclass(frozen=True)
class _Work:
    """A process's seconds and counts since it began, or those between two moments."""

    busy: float = 0.0  # all but waits
    draws: float = 0.0
    fixed: float = 0.0  # that do not depend on how many generators there are: the tail, and new weights
    full: float = 0.0
    slot: float = 0.0
    made: float = 0.0
    computes: float = 0.0

    def plus(self, other: _Work, times: float = 1.0) -> _Work:
        mine, others = vars(self), vars(other)
        return _Work(**{name: mine[name] + times * others[name] for name in mine})


@dataclass(frozen=True)
class _Point:
    at: float
    waits: bool
    work: _Work


@dataclass
class _Trail:
    """The work of one process over time, from its heartbeats."""

    pid: int
    points: deque[_Point]
    step_s: float = 0.0  # of its latency curve: a step ...
    sample_s: float = 0.0  # ... and each sample in it
    version: float = -1.0
    ended: bool = False
    loaded_at: float | None = None  # when it first had weights

    def until(self, moment: float) -> _Work:
        """Return the work up to a moment: between two heartbeats by what they say of waits."""
        before = self.points[0]
        for point in self.points:
            if point.at >= moment:
                return before.work.plus(_between(before, point), _share(before, point, moment))
            before = point
        return before.work


def _between(one: _Point, other: _Point) -> _Work:
    return other.work.plus(one.work, -1.0)


def _share(one: _Point, other: _Point, moment: float) -> float:
    """Return the share of the work between two heartbeats that was done by a moment."""
    if moment <= one.at or other.at <= one.at:
        return 0.0
    busy = min(other.work.busy - one.work.busy, other.at - one.at)
    if busy <= 0 or one.waits == other.waits:
        return (moment - one.at) / (other.at - one.at)
    if one.waits:  # first it waited, then it worked
        return max(0.0, moment - (other.at - busy)) / busy
    return min(1.0, (moment - one.at) / busy)


@dataclass
class _Ended:
    """An iteration that is trained."""

    number: int
    at: float
    since: float
    samples: int = 0
    tokens: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0


@dataclass
class SideTimes:
    """Takes a run's heartbeats and steps, and gives both sides' times of each iteration. Repeats are fine."""

    spec: RunSpec
    since: float = 0.0  # iterations that began before are not given
    _trails: dict[str, _Trail] = field(default_factory=dict)
    _step: int = -1
    _epoch: int = -1
    _open: _Ended | None = None
    _ended: deque[_Ended] = field(default_factory=lambda: deque(maxlen=64))
    _heard_at: float = 0.0

    def take(self, message: object) -> None:
        """Take a message of any topic."""
        if isinstance(message, StepRecord):
            self._take_step(message)
        elif isinstance(message, Heartbeat) and message.role in ("generator", "trainer"):
            self._take_beat(message)

    def ready(self) -> Iterator[IterationTimes]:
        """Yield the iterations whose heartbeats are there, in order; each once."""
        while self._ended and self._is_heard(self._ended[0].at):
            if (found := self._times(self._ended.popleft())) is not None:
                yield found

    def _take_step(self, step: StepRecord) -> None:
        if step.step <= self._step:
            return
        self._step = step.step
        if step.trainer_epoch != self._epoch:  # what a new trainer made up is no measure
            self._epoch, self._open = step.trainer_epoch, None
        now = self._open
        if now is not None:
            now.samples += int(step.groups.size)
            now.tokens += float(step.lengths.sum())
            now.compute_s += max(0.0, step.metrics.get("compute_s", 0.0))
            now.wait_s += max(0.0, step.metrics.get("waited_s", 0.0))
        if step.last_of_iteration:
            if now is not None and now.since >= self.since and step.finished_at > now.since:
                now.at = step.finished_at
                self._ended.append(now)
            self._open = _Ended(step.iteration + 1, 0.0, step.finished_at)

    def _take_beat(self, beat: Heartbeat) -> None:
        name, point = f"{beat.role}-{beat.number}@{beat.host}", _point(beat)
        self._heard_at = max(self._heard_at, beat.sent_at)
        trail = self._trails.get(name)
        if trail is None or trail.pid != beat.pid:
            if trail is not None and trail.points[-1].at > beat.sent_at:
                return  # of an earlier process
            if trail is None and len(self._trails) >= _PROCESSES:
                del self._trails[min(self._trails, key=lambda known: self._trails[known].points[-1].at)]
            born = beat.sent_at - sum(beat.causes.values())
            trail = self._trails[name] = _Trail(beat.pid, deque([_Point(born, True, _Work())], _POINTS))
        if point.at < trail.points[-1].at:
            return
        if point.at > trail.points[-1].at:
            trail.points.append(point)
        counters, trail.ended = beat.counters, beat.is_last
        trail.step_s = max(0.0, counters.get("step_s", trail.step_s))
        trail.sample_s = max(0.0, counters.get("sample_s", trail.sample_s))
        if trail.loaded_at is None and counters.get("version", -1.0) >= 0:
            trail.loaded_at = beat.sent_at

    def _is_heard(self, moment: float) -> bool:
        if self._heard_at - moment > _LATE_S:
            return True
        there = [one for one in self._trails.values() if not one.ended]
        return all(
            one.points[-1].at >= moment for one in there if self._heard_at - one.points[-1].at < _SILENT_S
        )

    def _there(self, moment: float) -> list[_Trail]:
        """Return the generators that could work at a moment."""
        return [
            one
            for name, one in self._trails.items()
            if name.startswith("generator-") and one.loaded_at is not None and one.loaded_at <= moment
            and one.points[-1].at >= moment - (0.0 if one.ended else _SILENT_S)
        ]  # fmt: skip

    def _times(self, done: _Ended) -> IterationTimes | None:
        there = self._there(done.at)
        if not there or not done.samples:
            return None
        works = [one.until(done.at).plus(one.until(done.since), -1.0) for one in there]
        count, on_policy = len(there), self.spec.algorithm.mode == "sync"
        trainer = self._trainer(done)
        if on_policy:
            busiest = max(range(count), key=lambda number: works[number].busy)
            gen_s = works[busiest].busy
            more, fewer = (self._with(there[busiest], works[busiest], count, n) for n in (1, -1))
            train_s = done.compute_s or trainer.computes
        else:
            train_s = max(done.compute_s, trainer.busy)
            gen_s = self._in_async(there, works, done) / count
            more, fewer = (gen_s * count / max(1, count + n) for n in (1, -1))
        return IterationTimes(done.number, gen_s, train_s, count, more, fewer, done.tokens)

    def _trainer(self, done: _Ended) -> _Work:
        found = [one for name, one in self._trails.items() if name.startswith("trainer-0@")]
        newest = max(found, key=lambda one: one.points[-1].at, default=None)
        return _Work() if newest is None else newest.until(done.at).plus(newest.until(done.since), -1.0)

    def _with(self, trail: _Trail, work: _Work, count: int, more: int) -> float:
        """Return the seconds of a generator of a sync run, if so many more shared the work.

        While its slots are full, others wait for them, and it gets its share of all. Else its steps have
        fewer samples, and are as much faster as its latency curve says. The tail stays.
        """
        share = count / max(1, count + more)
        full, fixed = min(work.full, work.draws), min(work.fixed, work.busy)
        rest = max(0.0, work.busy - full - fixed)
        slots = self.spec.generator.slots
        drawn = max(1e-9, work.draws - full)
        batch = min(max(1.0, (work.slot - full * slots) / drawn), float(slots))
        if (step := trail.step_s + trail.sample_s * batch) <= 0:
            return (full + rest) * share + fixed
        then = batch * share
        at_once = trail.step_s + trail.sample_s * min(max(1.0, then), float(slots))
        return full * share + rest * at_once / step * max(1.0, then / slots) + fixed

    def _in_async(self, there: list[_Trail], works: list[_Work], done: _Ended) -> float:
        """Return the generators' seconds for an iteration's samples, all together."""
        slots, needed, spent, made = self.spec.generator.slots, 0.0, 0.0, 0.0
        for trail, work in zip(there, works, strict=True):
            full = min(work.full, work.draws)
            partly = work.draws - full
            batch = max(1.0, (work.slot - full * slots) / partly) if partly > 0 else float(slots)
            step_s, sample_s = (trail.step_s, trail.sample_s) if trail.step_s + trail.sample_s else (1.0, 0.0)
            rate = (batch / slots) * (step_s + sample_s * slots) / (step_s + sample_s * batch)
            needed += work.busy - partly * (1 - min(1.0, rate))
            spent, made = spent + work.busy, made + work.made
        # if the trainer waits though they are not full, their samples can't be made any faster at once
        seconds = min(spent, needed + done.wait_s * len(there))
        return seconds * done.samples / made if made else seconds


def _point(beat: Heartbeat) -> _Point:
    causes, counters = beat.causes, beat.counters
    busy = sum(s for cause, s in causes.items() if not cause.startswith(WAIT) and cause not in _NO_WORK)
    if beat.role == "trainer":  # whatever it waits for, but for samples, it needs
        busy += sum(s for cause, s in causes.items() if cause.startswith(WAIT) and cause != f"{WAIT}samples")
    return _Point(
        beat.sent_at,
        bool(beat.waits_for) or beat.state == "starting" or beat.is_last,
        _Work(
            busy=busy,
            draws=sum(causes.get(one, 0.0) for one in _DRAWS),
            fixed=causes.get(_TAIL, 0.0) + causes.get(_INSTALL, 0.0),
            full=max(0.0, counters.get("full_s", 0.0)),
            slot=max(0.0, counters.get("slot_s", 0.0)),
            made=max(0.0, counters.get("made", 0.0)),
            computes=sum(causes.get(one, 0.0) for one in _COMPUTES),
        ),
    )
