"""The state of a run in numbers for people, made from the messages on its topics alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec import structs

from flows.view.metric_rows import MetricRow, evaluation_row, step_row
from flows.view.reward_trouble import RewardTrouble
from infra.liveness import Evidence
from schemas.messages import (
    BalanceRecord,
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

RATE_SPAN_S = 15.0
QUIET_S = 10.0  # a process whose heartbeat is older is not shown as alive
ROWS = 400  # newest steps, and evaluations, that a view holds
_BALANCE = 50  # newest changes of the number of generators
_MOST, _MOST_POINTS = 2000, 400  # maximum processes or relays of a view, and points of a rate
_LENGTHS, _LENGTHS_OF_STEP = 4000, 400  # newest pairs of lengths that a view holds; maximum of one step


class Rate:
    """The speed at which a number has grown over the last seconds."""

    def __init__(self, span_s: float = RATE_SPAN_S) -> None:
        self._span_s = span_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, total: float) -> None:
        """Add the number as it was at a time, in seconds."""
        if self._points and (total < self._points[-1][1] or at < self._points[-1][0]):
            self._points.clear()  # a process started again and counts from zero
        self._points.append((at, total))
        while len(self._points) > 2 and self._points[1][0] < at - self._span_s:
            self._points.popleft()
        if len(self._points) > _MOST_POINTS:
            self._points.popleft()

    @property
    def per_s(self) -> float | None:
        """Growth a second; None while it is not known."""
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
    heard_at: float | None = None  # monotonic; None: the heartbeat was sent before the view began

    def hear(self, beat: Heartbeat, *, live: bool = False) -> None:
        """Take the next heartbeat. `live`: it has just been sent, whatever the clock of its machine says."""
        self.heard_at = time.monotonic() if live else None
        if beat.pid != self.beat.pid:
            self.idle, self.cpu = Rate(), Rate()
        self.beat = beat
        waiting = beat.sent_at - beat.since if beat.waits_for else 0.0
        self.idle.add(beat.sent_at, beat.counters.get("idle_s", 0.0) + waiting)
        self.cpu.add(beat.sent_at, beat.counters.get("cpu_s", 0.0))

    @property
    def alive(self) -> bool:
        """Whether the newest heartbeat is recent, and says that more will come."""
        return not self.beat.is_last and self.silent_s < QUIET_S

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        if self.heard_at is not None:
            return time.monotonic() - self.heard_at
        return time.time() - self.beat.sent_at

    @property
    def idle_share(self) -> float | None:
        """Share of the last seconds in which the process waited; None while it is not known."""
        share = self.idle.per_s
        return None if share is None else min(1.0, share)

    @property
    def doing(self) -> str:
        """The state of the process in words."""
        beat = self.beat
        if beat.is_last:
            return beat.state
        if (silent := self.silent_s) > QUIET_S:
            clock = "" if self.heard_at is not None else " by this machine's clock"
            return f"silent for {silent:.0f} s{clock} (was: {beat.waits_for or beat.state})"
        if not beat.waits_for:
            return beat.state
        return f"waits {max(0.0, beat.sent_at - beat.since):.0f} s for {beat.waits_for} ← {beat.unblocked_by}"


class RunView:
    """The state of one run. Not thread-safe: `flows.view.follow` guards it.

    The view holds only the newest records, so that a run of any age takes the same memory.
    """

    def __init__(self, run: str, spec: RunSpec) -> None:
        classes = spec.lengths.classes
        self.run, self.spec = run, spec
        self.processes: dict[str, ProcessView] = {}
        self.left_out: dict[str, str] = {}  # processes that can't be kept alive, and why
        self.rows: deque[MetricRow] = deque(maxlen=ROWS)
        self.evaluations: deque[MetricRow] = deque(maxlen=ROWS)
        self.balance: deque[BalanceRecord] = deque(maxlen=_BALANCE)
        self.version: int | None = None
        self.sites: dict[tuple[str, int], SiteReport] = {}  # by site and relay
        self.dead_letters = 0  # all that there have ever been
        self.last_dead = ""
        self.rewards = RewardTrouble()
        self.trouble = ""  # why the view itself is not up to date
        self.generated = np.zeros(classes, np.int64)  # samples on the topic, by class
        self.behind = np.zeros(classes, np.int64)  # offset behind the newest trained sample, by class
        self.lengths: deque[tuple[float, int]] = deque(maxlen=_LENGTHS)  # predicted and true, of samples
        self.edges: list[float] = []  # between the length classes in force for the newest prompt
        self.evidence = Evidence()
        self.live = False  # whether the records that come now have just been sent
        self._generated_rate, self._trained_rate = Rate(), Rate()
        self._trained_total = 0

    def take(self, message: object) -> None:
        """Take one message of any topic."""
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
            case BalanceRecord():
                self.balance.append(message)

    def take_all(self, messages: Iterable[Message], sample_ends: dict[int, int], dead: int = 0) -> None:
        """Take the messages of one read.

        `sample_ends`: end offsets of the partitions of `<run>.samples`; `dead`: all dead letters so far.
        """
        for message in messages:
            self.take(message)
        self.dead_letters = max(self.dead_letters, dead)
        self.evidence.tick()
        self._count_samples(sample_ends, time.time())

    def leave_out(self, found: dict[str, str]) -> None:
        """Show processes that are left out. `found`: the reason by process."""
        self.left_out = found

    def _take_beat(self, beat: Heartbeat) -> None:
        name = f"{beat.role}-{beat.number}"
        if name not in self.processes and len(self.processes) >= _MOST:
            del self.processes[max(self.processes, key=lambda known: self.processes[known].silent_s)]
        self.processes.setdefault(name, ProcessView(beat)).hear(beat, live=self.live)
        self.evidence.heard(beat)
        self.rewards.take_beat(beat)

    def _count_samples(self, ends: dict[int, int], at: float) -> None:
        for partition, end in ends.items():
            self.generated[partition] = end
        if ends:
            self._generated_rate.add(at, float(self.generated.sum()))

    def _take_step(self, record: StepRecord) -> None:
        if self.rows and (self.rows[-1]["step"] or 0) >= record.step:
            return  # a trainer that was thought dead wrote it: the first record of a step counts
        self.rows.append(step_row(record))
        self.rewards.take_step(record)
        rows = record.lengths.size
        if record.predicted.size == rows:
            self._take_lengths(record)
        if self.spec.algorithm.mode != "offline" and record.partitions.size == record.offsets.size == rows:
            # the samples of an offline run are on the topic of another one
            known = record.partitions < self.behind.size
            np.maximum.at(self.behind, record.partitions[known], record.offsets[known] + 1)
        self.version = max(record.version_out, self.version or 0)
        self._trained_total += int(record.groups.size)
        self._trained_rate.add(record.finished_at, float(self._trained_total))

    def _take_lengths(self, record: StepRecord) -> None:
        pick = slice(None, None, max(1, -(-record.lengths.size // _LENGTHS_OF_STEP)))
        predicted, true = record.predicted[pick].tolist(), record.lengths[pick].tolist()
        self.lengths.extend(zip(predicted, true, strict=True))

    def lag(self) -> list[int] | None:
        """Return, by class, how many samples came after the newest trained one; None if none is trained."""
        if not self.behind.any():
            return None
        left: list[int] = np.maximum(0, self.generated - self.behind).tolist()
        return left

    @property
    def wanted_generators(self) -> int | None:
        """How many generators the run should have; None if its balance is not watched and never was."""
        if self.balance:
            return self.balance[-1].after
        if self.spec.placement.balance is None:
            return None
        return sum(one.alive for one in self.processes.values() if one.beat.role == "generator")

    def makes_samples(self) -> bool:
        """Whether any generator sends heartbeats, on whichever machine."""
        return any(process.alive for process in self.processes.values() if process.beat.role == "generator")

    @property
    def last(self) -> MetricRow | None:
        """The row of the newest step; None if there is none."""
        return self.rows[-1] if self.rows else None

    def iterations_begun(self) -> int:
        """How many iterations have a step in the ledger."""
        return 0 if self.last is None else int(self.last["iteration"] or 0) + 1

    @property
    def logprob_gap(self) -> float | None:
        """Logprob gap of the newest step that had samples of its own weights; others do not show it."""
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
        """Samples that are admitted and not finished, by the feeder's count; None if it has not said."""
        counters = self._counters("feeder-0")
        if "undispatched" not in counters:
            return None
        return int(counters["undispatched"] + counters.get("dispatched", 0.0))

    @property
    def to_train(self) -> int | None:
        """Samples that are finished and not trained, by the trainer's count; None if it has not said."""
        held = self._counters("trainer-0").get("held")
        return None if held is None else int(held)

    def _counters(self, name: str) -> dict[str, float]:
        return self.processes[name].beat.counters if name in self.processes else {}

    def as_json(self) -> dict[str, object]:
        """Return the state of the run as numbers and texts, for programs."""
        return {
            "processes": {
                name: {
                    "alive": one.alive, "doing": one.doing, "idle_share": one.idle_share,
                    "silent_s": one.silent_s, **structs.asdict(one.beat),
                }
                for name, one in sorted(self.processes.items())
            },
            "left_out": self.left_out,
            "last_step": self.last,
            "last_evaluation": self.evaluations[-1] if self.evaluations else None,
            "version": self.version,
            "generated": self.generated.tolist(),  # by length class
            "lag": self.lag(),  # likewise
            "to_generate": self.to_generate,
            "to_train": self.to_train,
            "dead_letters": self.dead_letters,
            "last_dead": self.last_dead or None,
            "sites": [structs.asdict(report) for report in self.sites.values()],
            "balance": [structs.asdict(one) for one in self.balance],
        }  # fmt: skip

    def waits(self) -> str:
        """Return the state of each process, one a line, for the message that nothing moves."""
        return "\n".join(f"  {name}: {process.doing}" for name, process in sorted(self.processes.items()))
