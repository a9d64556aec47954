"""What a run looks like now, in numbers for people: fed from its topics, and nothing else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flows.view.metric_rows import MetricRow, evaluation_row, step_row
from infra.liveness import Evidence
from schemas.messages import (
    DeadLetter,
    Evaluation,
    Heartbeat,
    RankerAnnouncement,
    SiteReport,
    StepRecord,
    WeightsAnnouncement,
)
from schemas.runspec import RunSpec
from schemas.wire import Message

RATE_WINDOW_S = 15.0
QUIET_S = 10.0  # a process whose heartbeat is older is not shown as alive
ROWS = 400  # newest steps, and evaluations, that a view holds
_MOST, _MOST_POINTS = 2000, 400  # processes or relays that are held, and points of a rate


class Rate:
    """How fast a growing number grows, over the last seconds."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, total: float) -> None:
        """The number as it was at a time."""
        if self._points and (total < self._points[-1][1] or at < self._points[-1][0]):
            self._points.clear()  # a process started again and counts from zero
        self._points.append((at, total))
        while len(self._points) > 2 and self._points[1][0] < at - self._window_s:
            self._points.popleft()
        if len(self._points) > _MOST_POINTS:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """None while it is not known."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None


@dataclass
class ProcessView:
    """A process as its heartbeats show it."""

    beat: Heartbeat
    idle: Rate = field(default_factory=Rate)
    cpu: Rate = field(default_factory=Rate)
    heard_at: float | None = None  # monotonic; None: it was said before anybody listened

    def hear(self, beat: Heartbeat, *, live: bool = False) -> None:
        """The next heartbeat. `live`: it has just been sent, whatever the clock of its machine says."""
        self.heard_at = time.monotonic() if live else None
        if beat.pid != self.beat.pid:
            self.idle, self.cpu = Rate(), Rate()
        self.beat = beat
        waiting = beat.sent_at - beat.since if beat.waits_for else 0.0
        self.idle.add(beat.sent_at, beat.counters.get("idle_s", 0.0) + waiting)
        self.cpu.add(beat.sent_at, beat.counters.get("cpu_s", 0.0))

    @property
    def alive(self) -> bool:
        """Whether it says so itself, lately."""
        return self.beat.state != "ended" and self.silent_s < QUIET_S

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard of it."""
        if self.heard_at is not None:
            return time.monotonic() - self.heard_at
        return time.time() - self.beat.sent_at

    @property
    def idle_share(self) -> float | None:
        """Share of its time in which it waited."""
        share = self.idle.per_s
        return None if share is None else min(1.0, share)

    @property
    def doing(self) -> str:
        """In words."""
        beat = self.beat
        if beat.state == "ended":
            return "ended"
        if (silent := self.silent_s) > QUIET_S:
            return f"silent for {silent:.0f} s (was: {beat.waits_for or beat.state})"
        if not beat.waits_for:
            return beat.state
        return f"waits {max(0.0, beat.sent_at - beat.since):.0f} s for {beat.waits_for} ← {beat.unblocked_by}"


class RunView:
    """The state of one run. Not thread-safe: `flows.view.follow` guards it.

    It holds the newest of everything, and of a run of any age as much.
    """

    def __init__(self, run: str, spec: RunSpec) -> None:
        classes = spec.lengths.classes
        self.run, self.spec = run, spec
        self.processes: dict[str, ProcessView] = {}
        self.left_out: dict[str, str] = {}  # processes that can't be kept alive, and why
        self.rows: deque[MetricRow] = deque(maxlen=ROWS)
        self.evaluations: deque[MetricRow] = deque(maxlen=ROWS)
        self.version: int | None = None
        self.sites: dict[tuple[str, int], SiteReport] = {}  # by site and relay
        self.dead_letters = 0  # on the topic, ever
        self.last_dead = ""
        self.trouble = ""  # why the view itself is not up to date
        self.generated = np.zeros(classes, np.int64)  # samples on the topic, by class
        self.edges: list[float] = []  # of length classes, in force for the newest prompt
        self.evidence = Evidence()
        self.live = False  # whether what comes now has just been sent
        self._generated_rate, self._trained_rate = Rate(), Rate()
        self._trained_total = 0

    def take(self, message: object) -> None:
        """One message of any topic."""
        match message:
            case Heartbeat():
                self._take_beat(message)
            case StepRecord():
                self._take_step(message)
            case Evaluation():
                self.evaluations.append(evaluation_row(message))
            case WeightsAnnouncement():
                self.version = max(message.version, self.version or 0)
            case SiteReport():
                if len(self.sites) < _MOST or (message.site, message.relay) in self.sites:
                    self.sites[message.site, message.relay] = message
            case DeadLetter():
                self.last_dead = f"{message.topic}[{message.partition}]@{message.offset}: {message.reason}"
            case RankerAnnouncement():
                self.edges = message.edges

    def take_all(self, messages: Iterable[Message], sample_ends: dict[int, int], dead: int = 0) -> None:
        """What was read in one go, where the partitions of the samples end, and the dead letters ever."""
        for message in messages:
            self.take(message)
        self.dead_letters = max(self.dead_letters, dead)
        self.evidence.tick()
        self._count_samples(sample_ends, time.time())

    def leave_out(self, found: dict[str, str]) -> None:
        """Processes that the flow no longer starts again, for people to see."""
        self.left_out = found

    def _take_beat(self, beat: Heartbeat) -> None:
        name = f"{beat.role}-{beat.instance}"
        if name not in self.processes and len(self.processes) >= _MOST:
            del self.processes[max(self.processes, key=lambda known: self.processes[known].silent_s)]
        self.processes.setdefault(name, ProcessView(beat)).hear(beat, live=self.live)
        self.evidence.heard(beat)

    def _count_samples(self, ends: dict[int, int], at: float) -> None:
        for partition, end in ends.items():
            self.generated[partition] = end
        self._generated_rate.add(at, float(self.generated.sum()))

    def _take_step(self, record: StepRecord) -> None:
        if self.rows and (self.rows[-1]["step"] or 0) >= record.step:
            return  # of a trainer that was thought dead: the first record of a step counts
        self.rows.append(step_row(record))
        self.version = max(record.version_out, self.version or 0)
        self._trained_total += int(record.groups.size)
        self._trained_rate.add(record.finished_at, float(self._trained_total))

    def makes_samples(self) -> bool:
        """Whether any generator is heard, wherever it is."""
        return any(process.alive for process in self.processes.values() if process.beat.role == "generator")

    @property
    def last(self) -> MetricRow | None:
        """The newest step."""
        return self.rows[-1] if self.rows else None

    def iterations_begun(self) -> int:
        """How many iterations have a step in the ledger."""
        return 0 if self.last is None else int(self.last["iteration"] or 0) + 1

    @property
    def logprob_gap(self) -> float | None:
        """Of the newest step that had samples of its own weights: only those can tell."""
        return next((row["logprob_gap"] for row in reversed(self.rows) if row.get("gap_tokens")), None)

    @property
    def generated_per_s(self) -> float | None:
        """Samples a second that the generators finish."""
        return self._generated_rate.per_s

    @property
    def trained_per_s(self) -> float | None:
        """Samples a second that the trainer trains."""
        return self._trained_rate.per_s

    @property
    def to_generate(self) -> int | None:
        """Samples that are admitted and not finished, as the feeder counts them."""
        counters = self._counters("feeder-0")
        if "undispatched" not in counters:
            return None
        return int(counters["undispatched"] + counters.get("dispatched", 0.0))

    @property
    def to_train(self) -> int | None:
        """Samples that are finished and not trained, as the trainer counts them."""
        held = self._counters("trainer-0").get("held")
        return None if held is None else int(held)

    def _counters(self, name: str) -> dict[str, float]:
        return self.processes[name].beat.counters if name in self.processes else {}

    def waits(self) -> str:
        """What each process does, one a line: for the message when nothing gets on."""
        return "\n".join(f"  {name}: {process.doing}" for name, process in sorted(self.processes.items()))
