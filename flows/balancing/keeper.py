"""Keeps a run balanced: judges each iteration, has the number of generators changed, and records why.

messages ──► SideTimes ──► Balancer ── a change ──► <run>.balance ──► staff: starts one, or has one leave
                                                       │
                              status, live view, page, Prometheus, and the next start of the run
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from flows.balancing.balancer import Balancer, Verdict
from flows.balancing.side_times import SideTimes
from flows.balancing.staff import CannotChange, Staff
from flows.view.balance_words import balance_in_words
from infra.bus import Bus, BusError, read_all
from infra.gate import Gate, passed_over
from infra.run_bus import connect
from infra.runs import RunRecord
from schemas.balancing import BalanceSection
from schemas.messages import BalanceRecord
from schemas.runspec import RunSpec
from schemas.topics import Topics
from schemas.wire import Message, encode

_READ_S, _SEND_S = 30.0, 10.0


class BalanceBook:
    """The records of a run's balance, on `<run>.balance`."""

    def __init__(self, record: RunRecord, connected: Callable[[RunRecord, str], Bus] = connect) -> None:
        self._record, self._connected = record, connected
        self._topic = Topics(record.id, record.spec.lengths.classes).balance

    def read(self) -> list[BalanceRecord]:
        """Return all records, in order. A run of an older release gets the topic."""
        bus = self._connected(self._record, "streamrl-balance")
        try:
            bus.create_topics([self._topic])
            gate = Gate(BalanceRecord, self._record.id, passed_over)
            return gate.messages(read_all(bus, self._topic, deadline_s=_READ_S))
        finally:
            bus.close()

    def write(self, found: BalanceRecord) -> None:
        """Append a record, and wait until the broker has it."""
        bus = self._connected(self._record, "streamrl-balance")
        try:
            writer = bus.writer()
            try:
                writer.send(self._topic, encode(found), key=str(found.iteration))
                writer.flush(_SEND_S)
            finally:
                writer.close()
        finally:
            bus.close()


class BalanceKeeper:
    """Watches over the balance of one run. `take` may be called by another thread than `tick`."""

    def __init__(
        self, spec: RunSpec, rule: BalanceSection, staff: Staff, write: Callable[[BalanceRecord], None],
        past: Sequence[BalanceRecord] = (), *, run: str, decided_by: str, say: Callable[[str], None],
        since: float = 0.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`since`: iterations that began before that time are not judged."""
        self._staff, self._write, self._run, self._say, self._by = staff, write, run, say, decided_by
        self._clock = clock
        self._dry = rule.dry or not staff.acts
        self._rule = rule if rule.dry == self._dry else rule.model_copy(update={"dry": self._dry})
        self._balancer = Balancer(self._rule, [_verdict(one) for one in past if not one.dry])
        self._last = past[-1] if past else None
        self._times = SideTimes(spec, since)
        self._lock = threading.Lock()  # of the times
        self._acted_at: float | None = None  # when a change was begun that may not be seen yet
        self._patience_s = spec.deadlines.start_s  # a generator may take so long to be ready
        self.newest: Verdict | None = None

    def take(self, message: Message) -> None:
        """Take a message of any topic of the run."""
        with self._lock:  # at once: a step of many samples takes much memory
            self._times.take(message)

    def tick(self) -> list[BalanceRecord]:
        """Judge the iterations that are done, and act. Return what was decided."""
        with self._lock:
            ready = list(self._times.ready())
        decided = []
        for one in ready:
            if self._balancer.wanted in (None, one.generators):
                self._acted_at = None  # it is seen
            if self._acted_at is not None and self._clock() - self._acted_at > self._patience_s:
                self._acted_at = None
                self._balancer.give_up()
            verdict = self._balancer.observe(
                one.iteration, one.gen_s, one.train_s, one.generators, more_s=one.more_s,
                fewer_s=one.fewer_s, tokens=one.tokens,
            )  # fmt: skip
            self.newest = verdict
            if verdict.change and (found := self._decide(verdict)) is not None:
                decided.append(found)
        return decided

    def _decide(self, verdict: Verdict) -> BalanceRecord | None:
        found = BalanceRecord(
            run=self._run, iteration=verdict.iteration, gen_s=verdict.gen_s, train_s=verdict.train_s,
            gain_s=verdict.gain_s, before=verdict.before, after=verdict.after, dry=self._dry,
            reason=verdict.reason, decided_by=self._by, decided_at=time.time(),
        )  # fmt: skip
        if self._dry and self._last is not None and _is_same(self._last, found):
            return None  # recommended already, and nobody has followed
        try:
            if not self._dry:
                (self._staff.grow if verdict.change > 0 else self._staff.shrink)()
            self._write(found)
        except CannotChange as error:
            self._say(f"the number of generators stays {verdict.before}: {error}")
            self._acted_at = self._clock()  # to be tried again later
            return None
        except BusError as error:
            self._say(f"a change of balance is not on record: {error}")
        self._last, self._acted_at = found, self._clock()
        self._say(balance_in_words(found))
        return found


def _is_same(one: BalanceRecord, other: BalanceRecord) -> bool:
    return (one.dry, one.before, one.after) == (other.dry, other.before, other.after)


def _verdict(one: BalanceRecord) -> Verdict:
    return Verdict(one.iteration, one.gen_s, one.train_s, one.gain_s, one.before, one.after, one.reason)
