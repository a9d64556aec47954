"""Liveness: whether any process of a run makes progress, so that a deadline ends a dead run, not a slow one.

    every process ── <run>.status ──► the feeder's process: Evidence ── <run>.pulse ──► Pulses: every wait
                     state, counters,                       alive; nothing moved for N s,
                     what it waits for                      and who waits for what

A process moves if one of its counters (tokens, samples, steps, bytes) grows beyond its maximum so far, or if
the process says that it works and uses a processor. A process that waits does not move, whatever its threads
use; nor does one that says that it works and uses no processor. So two processes that wait for each other are
still, and so is one that hangs.

Times are those of the reader's own monotonic clock. Time in which the reader itself did not run is not
counted: a machine that slept finds nobody late. When pulses stop, the time since the last one counts.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from infra.background import Background
from infra.bus import Bus, Writer, ends_of
from infra.gate import Gate, passed_over
from schemas.messages import Heartbeat, Pulse
from schemas.topics import Topics
from schemas.wire import encode

PULSE_S = 2.0
_BUSY = 0.1  # share of a processor: more than heartbeats and open connections use
_LOOK_S = 2.0  # at least so long between two looks at the processor time used
_GAP_S = 10.0  # at most so much counts between two ticks: in a longer gap nobody looked
_SILENT_S = 30.0
_FORGET_S = 600.0
_MOST_PROCESSES, _MOST_COUNTERS, _MOST_WAITS = 4096, 64, 12
_NO_PROGRESS = {"dead_letters", "duplicates"}  # they grow when things go wrong
_LONGEST = 2000

Now = Callable[[], float]
_Name = tuple[str, int, str, int]  # role, number, host, process


@dataclass
class _Seen:
    beat: Heartbeat
    heard_at: float
    best: dict[str, float] = field(default_factory=dict)
    cpu: tuple[float, float] | None = None  # time of the last look, and processor seconds used by then

    def grew(self, beat: Heartbeat) -> str:
        """Return the name of a counter that exceeds its maximum so far, or ''. Ignore those of seconds."""
        found = ""
        for name, value in islice(beat.counters.items(), _MOST_COUNTERS):
            if name.endswith("_s") or name in _NO_PROGRESS or not math.isfinite(value):
                continue
            if value > self.best.get(name, 0.0):
                self.best[name], found = value, name
        return found

    def works(self, beat: Heartbeat, now: float) -> bool:
        """Return whether the process says that it works, and has used a processor since the last look."""
        if beat.waits_for or beat.is_last or (beat.role == "feeder" and beat.state != "starting"):
            self.cpu = None  # a feeder's threads always have something to do
            return False
        used = beat.counters.get("work_s", beat.counters.get("cpu_s", 0.0))
        if self.cpu is None:
            self.cpu = now, used
            return False
        passed, share = now - self.cpu[0], used - self.cpu[1]
        if passed < _LOOK_S:
            return False
        self.cpu = now, used
        return share >= _BUSY * passed


class Evidence:
    """Tracks when something last moved, by the heartbeats of all processes. Not thread-safe."""

    def __init__(self, clock: Now = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[_Name, _Seen] = {}
        self._ticked_at = self._forget_at = clock()
        self.still_s = 0.0
        self.moved = ""

    def heard(self, beat: Heartbeat) -> None:
        """Take in a heartbeat of any process."""
        now, name = self._clock(), (beat.role, beat.number, beat.host, beat.pid)
        known = self._seen.get(name)
        if known is None:
            self._forget(now)
            known = self._seen[name] = _Seen(beat, now)
            known.grew(beat)  # its counters grew before anyone listened: no movement
            known.works(beat, now)
            return
        if counter := known.grew(beat):
            self._move(f"{beat.role}-{beat.number}: {counter} {beat.counters[counter]:.10g}")
        if known.works(beat, now):
            self._move(f"{beat.role}-{beat.number}: {beat.state}")
        known.beat, known.heard_at = beat, now

    def tick(self) -> None:
        """Add the time since the last tick, at most 10 s, to the time in which nothing moved."""
        now = self._clock()
        self.still_s += min(now - self._ticked_at, _GAP_S)
        self._ticked_at = now

    def _move(self, what: str) -> None:
        self.still_s, self.moved = 0.0, what[:200]

    def _forget(self, now: float) -> None:
        """Forget processes that have been silent for long; of too many, also the most silent tenth."""
        if len(self._seen) < _MOST_PROCESSES and now < self._forget_at:
            return
        self._forget_at = now + _SILENT_S
        by_silence = sorted(self._seen, key=lambda name: self._seen[name].heard_at)
        too_many = len(by_silence) // 10 if len(by_silence) >= _MOST_PROCESSES else 0
        for number, name in enumerate(by_silence):
            if number < too_many or now - self._seen[name].heard_at > _FORGET_S:
                del self._seen[name]

    def waits(self) -> str:
        """Return the processes with what they wait for, as text, grouped by what that is."""
        now = self._clock()
        together: dict[str, list[str]] = {}
        for (role, number, _, _), seen in sorted(self._seen.items()):
            if not seen.beat.is_last:
                together.setdefault(_doing(seen, now), []).append(f"{role}-{number}")
        parts = [f"{_names(names)} {doing}" for doing, names in together.items()]
        return "; ".join(parts[:_MOST_WAITS])[:_LONGEST]


def _names(names: list[str]) -> str:
    """Return the first name, and how many more there are of each role."""
    if len(names) == 1:
        return names[0]
    roles = Counter(name.rpartition("-")[0] for name in names[1:])
    return f"{names[0]} and {', '.join(f'{count} more {role}' for role, count in roles.items())}:"


def _doing(seen: _Seen, now: float) -> str:
    beat = seen.beat
    if now - seen.heard_at > _SILENT_S:
        return "is silent"
    if beat.waits_for:
        return f"waits for {beat.waits_for[:200]} ← {beat.unblocked_by[:100]}"
    return f"says that it is {beat.state[:100]}, but shows no progress"


class Pulsing:
    """In the feeder's process: a thread that hears the heartbeats of all processes and sends pulses."""

    def __init__(self, bus: Bus, writer: Writer, topics: Topics, run: str, *, deadline_s: float) -> None:
        self._writer, self._topic, self._run = writer, topics.pulse, run
        self._bus, self._status = bus, topics.status
        self._every_s = pulse_s(deadline_s)
        self._gate = Gate(Heartbeat, run, passed_over)
        self._evidence, self._lock = Evidence(), threading.Lock()
        self._closed = threading.Event()
        self._thread = Background(self._work, "pulse")

    def open(self) -> Pulsing:
        """Listen to heartbeats and send pulses, in a thread. Return itself."""
        ends = ends_of(self._bus, self._status)
        self._reader = self._bus.reader(self._status, ends, patient=True)
        self._thread.start()
        return self

    def still_s(self) -> float:
        """Return for how many seconds nothing has moved. Raise the error that ended the thread, if any."""
        self._thread.check()
        with self._lock:
            return self._evidence.still_s

    def waits(self) -> str:
        """Return the processes with what they wait for, as text."""
        with self._lock:
            return self._evidence.waits()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self._every_s):
            self._hear()
            self._writer.send(self._topic, encode(self._pulse()), key=self._run)
        self._reader.close()

    def _hear(self) -> None:
        until = time.monotonic() + self._every_s  # with many processes there is always one more beat
        while time.monotonic() < until and (records := self._reader.poll(0.05)):
            with self._lock:
                for beat in self._gate.messages(records):
                    self._evidence.heard(beat)
        with self._lock:
            self._evidence.tick()

    def _pulse(self) -> Pulse:
        with self._lock:
            found = self._evidence
            return Pulse(
                run=self._run, still_s=found.still_s, moved=found.moved, waits=found.waits(),
                sent_at=time.time(),
            )  # fmt: skip


class Pulses:
    """In every other process: a thread that reads the newest pulse at intervals."""

    def __init__(self, bus: Bus, topics: Topics, run: str, *, deadline_s: float) -> None:
        self._bus, self._topic = bus, topics.pulse
        self._every_s = pulse_s(deadline_s)
        self._gate = Gate(Pulse, run, passed_over)
        self._newest: tuple[Pulse, float] | None = None  # and when it came
        self._closed = threading.Event()
        self._thread = Background(self._work, "pulses")

    def open(self) -> Pulses:
        """Listen to pulses, in a thread. Return itself."""
        ends = ends_of(self._bus, self._topic)
        self._reader = self._bus.reader(self._topic, ends, patient=True)
        self._thread.start()
        return self

    def still_s(self) -> float:
        """Return for how many seconds nothing has moved or no pulse has come; infinite before the first one.

        Raise the error that ended the thread, if one did.
        """
        self._thread.check()
        if (newest := self._newest) is None:
            return math.inf
        return newest[0].still_s + time.monotonic() - newest[1]

    def waits(self) -> str:
        """Return the processes with what they wait for, as text."""
        if (newest := self._newest) is None:
            return "no feeder has been heard yet"
        silent = time.monotonic() - newest[1]
        if silent > max(_SILENT_S, 3 * self._every_s):
            return f"the feeder has not been heard for {silent:.0f} s; before that: {newest[0].waits}"
        return newest[0].waits

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self._every_s):
            for pulse in self._gate.messages(self._reader.poll(0.05)):
                self._newest = pulse, time.monotonic()
        self._reader.close()


def pulse_s(deadline_s: float) -> float:
    """Return the seconds between two pulses: 2, but at most a tenth of the deadline that they serve."""
    return min(PULSE_S, deadline_s / 10)
