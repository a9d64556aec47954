"""What a run looks like now, in numbers for people: fed from its topics, and nothing else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from flows.rows import Row, evaluation_row, step_row
from schemas.messages import (
    EVAL,
    DeadLetter,
    Evaluation,
    Heartbeat,
    Prompt,
    SiteReport,
    StepRecord,
    WeightsAnnouncement,
)
from schemas.runspec import RunSpec
from schemas.wire import Message

RATE_WINDOW_S = 15.0
QUIET_S = 10.0  # a process whose heartbeat is older is not shown as alive


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

    @property
    def per_s(self) -> float | None:
        """None while it is not known."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start else None


@dataclass
class Process:
    """A process as its heartbeats show it."""

    beat: Heartbeat
    idle: Rate = field(default_factory=Rate)
    cpu: Rate = field(default_factory=Rate)

    def hear(self, beat: Heartbeat) -> None:
        """The next heartbeat."""
        if beat.pid != self.beat.pid:
            self.idle, self.cpu = Rate(), Rate()
        self.beat = beat
        waiting = beat.sent_at - beat.since if beat.waits_for else 0.0
        self.idle.add(beat.sent_at, beat.counters.get("idle_s", 0.0) + waiting)
        self.cpu.add(beat.sent_at, beat.counters.get("cpu_s", 0.0))

    @property
    def alive(self) -> bool:
        """Whether it says so itself, lately."""
        return self.beat.state != "ended" and time.time() - self.beat.sent_at < QUIET_S

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
        silent = time.time() - beat.sent_at
        if silent > QUIET_S:
            return f"silent for {silent:.0f} s (was: {beat.waits_for or beat.state})"
        if not beat.waits_for:
            return beat.state
        return f"waits {max(0.0, beat.sent_at - beat.since):.0f} s for {beat.waits_for} ← {beat.unblocked_by}"


class RunView:
    """The state of one run. Not thread-safe: `flows.follow` guards it."""

    def __init__(self, run: str, spec: RunSpec) -> None:
        classes = spec.lengths.classes
        self.run, self.spec = run, spec
        self.processes: dict[str, Process] = {}
        self.rows: list[Row] = []
        self.evaluations: list[Row] = []
        self.version: int | None = None
        self.sites: dict[tuple[str, int], SiteReport] = {}  # by site and relay
        self.dead_letters = 0
        self.last_dead = ""
        self.trouble = ""  # why the view itself is not up to date
        self.generated = np.zeros(classes, np.int64)  # samples on the topic, by class
        self.edges: list[float] = []  # of length classes, in force for the newest prompt
        self._asked = np.zeros(classes, np.int64)
        self._trained = np.zeros(classes, np.int64)
        self._evaluated: dict[int, np.ndarray] = {}
        self._generated_rate, self._trained_rate = Rate(), Rate()
        self._trained_total = 0

    def take(self, message: object) -> None:
        """One message of any topic."""
        match message:
            case Heartbeat():
                name = f"{message.role}-{message.instance}"
                self.processes.setdefault(name, Process(message)).hear(message)
            case StepRecord():
                self._take_step(message)
            case Evaluation():
                self.evaluations.append(evaluation_row(message))
            case WeightsAnnouncement():
                self.version = message.version
            case SiteReport():
                self.sites[message.site, message.relay] = message
            case DeadLetter():
                self.dead_letters += 1
                self.last_dead = f"{message.topic}[{message.partition}]@{message.offset}: {message.reason}"
            case Prompt():
                self._take_prompt(message)

    def take_all(self, messages: Iterable[Message], sample_ends: dict[int, int]) -> None:
        """What was read in one go, and where the partitions of the samples topic end now."""
        for message in messages:
            self.take(message)
        self._count_samples(sample_ends, time.time())

    def _count_samples(self, ends: dict[int, int], at: float) -> None:
        for partition, end in ends.items():
            self.generated[partition] = end
        self._generated_rate.add(at, float(self.generated.sum()))

    def _take_step(self, record: StepRecord) -> None:
        if self.rows and (self.rows[-1]["step"] or 0) >= record.step:
            return  # of a trainer that was thought dead: the first record of a step counts
        classes = self._trained.size
        self._trained += np.bincount(record.partitions, minlength=classes)[:classes]
        self.rows.append(step_row(record))
        self._trained_total += int(record.groups.size)
        self._trained_rate.add(record.finished_at, float(self._trained_total))

    def _take_prompt(self, prompt: Prompt) -> None:
        place = min(prompt.length_class, self._asked.size - 1)
        self._asked[place] += prompt.size
        self.edges = prompt.edges
        if prompt.purpose == EVAL:
            counted = self._evaluated.setdefault(prompt.window, np.zeros_like(self._asked))
            counted[place] += prompt.size

    @property
    def last(self) -> Row | None:
        """The newest step."""
        return self.rows[-1] if self.rows else None

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
    def to_generate(self) -> list[int]:
        """Samples that are admitted and not finished, by class."""
        return [int(n) for n in np.maximum(self._asked - self.generated, 0)]

    @property
    def to_train(self) -> list[int]:
        """Samples that are finished and not trained, by class."""
        done = {int(row["version"] or 0) for row in self.evaluations}
        evaluated = sum(
            (n for window, n in self._evaluated.items() if window in done), np.zeros_like(self._asked)
        )
        return [int(n) for n in np.maximum(self.generated - self._trained - evaluated, 0)]

    @property
    def pulse(self) -> tuple[object, ...]:
        """Changes whenever the run gets on."""
        starting = tuple(sorted((n, p.beat.pid, p.beat.state) for n, p in self.processes.items()))
        return (
            len(self.rows),
            self._trained_total,
            int(self.generated.sum()),
            len(self.evaluations),
            self.version,
            starting,
        )

    def waits(self) -> str:
        """What each process does, one a line: for the message when nothing gets on."""
        return "\n".join(f"  {name}: {process.doing}" for name, process in sorted(self.processes.items()))
