"""What every process of a run has: its arguments, its run, log, heartbeat and an orderly end.

A role is started as `python -m producers.feeder --store URL --run count-1 [--instance 0]`, by the run flow
or by hand. Exit codes: 0 done, 1 failed (the last line of the log says why), 3 told to stop, 4 a newer
start of the same process has replaced it, so it is not to be started again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from infra.bus import SMALL_BATCH, Bus, BusError, Record, Writer
from infra.epochs import Replaced
from infra.errors import Explained
from infra.kafka_bus import KafkaBus
from infra.liveness import Pulses, Pulsing
from infra.logs import set_up
from infra.ownership import check_owner
from infra.runs import RunRecord, find, host_name
from infra.sites.place import Site, site_of
from infra.store import Store, open_store
from infra.store_identity import check_identity
from infra.supervise import children
from infra.waiting import NoSigns, Signs, Wait
from infra.weights import spent
from schemas.messages import DeadLetter, Heartbeat
from schemas.runspec import RunSpec
from schemas.topics import Topics
from schemas.wire import encode

DONE, FAILED, STOPPED, REPLACED = 0, 1, 3, 4
HEARTBEAT_S = 0.5  # at most so often: when what a process does has changed
_STEADY_S = 2.0  # else
_LONGEST_REASON = 4_000
_LARGEST_QUOTED = 256 << 10  # bytes of a record that are repeated in its dead letter


class Stopped(Exception):
    """The process was told to stop."""


class Heart:
    """Says on `<run>.status` what this process does, from a thread of its own."""

    def __init__(self, run: str, role: str, instance: int) -> None:
        self._run, self._role, self._instance = run, role, instance
        self._state, self._waits_for, self._unblocked_by = "starting", "", ""
        self._since = time.time()
        self._work_s = 0.0
        self._said: tuple[str, str] = ("", "")  # state and wait, as they were sent last
        self._said_at = 0.0
        self.counters: dict[str, float] = {}

    def working(self, state: str) -> None:
        """Now at work."""
        if self._waits_for or self._state != state:
            self._switch(state, "", "")

    def waiting(self, what: str, *, unblocked_by: str) -> None:
        """Now waiting; the time is counted as idle."""
        if self._waits_for != what:
            self._switch("waiting", what, unblocked_by)

    def _switch(self, state: str, waits_for: str, unblocked_by: str) -> None:
        now = time.time()
        if self._waits_for:
            self.counters["idle_s"] = self.counters.get("idle_s", 0.0) + now - self._since
        self._state, self._waits_for, self._unblocked_by, self._since = state, waits_for, unblocked_by, now

    def message(self) -> Heartbeat:
        """As it is now."""
        return Heartbeat(
            run=self._run, role=self._role, instance=self._instance, pid=os.getpid(), host=host_name(),
            state=self._state, waits_for=self._waits_for, unblocked_by=self._unblocked_by, since=self._since,
            counters=dict(self.counters) | self._used(), sent_at=time.time(),
        )  # fmt: skip

    def _used(self) -> dict[str, float]:
        """Processor seconds: its own; with its children's, which count while it does not wait; on weights."""
        own = time.process_time()
        if not self._waits_for:
            self._work_s = own + children.cpu_s()
        return {"cpu_s": own, "work_s": self._work_s, "weights_cpu_s": spent.seconds()}

    def is_due(self, steady_s: float = _STEADY_S) -> bool:
        """Whether it is time to beat: soon if what it does has changed, else now and then."""
        changed = self._said != (self._state, self._waits_for)
        return changed or time.monotonic() - self._said_at >= steady_s

    def beat(self, writer: Writer, topics: Topics) -> None:
        """Send it."""
        self._said, self._said_at = (self._state, self._waits_for), time.monotonic()
        writer.send(topics.status, encode(self.message()), key=f"{self._role}-{self._instance}")


@dataclass
class Context:
    """What a role works with."""

    record: RunRecord
    role: str
    instance: int
    store: Store
    bus: Bus
    writer: Writer
    topics: Topics
    heart: Heart
    stop: threading.Event
    log: logging.Logger
    site: Site | None = None  # if it is not where the object store is
    signs: Signs = field(default_factory=NoSigns)  # of life anywhere in the run
    feeder_epoch: int = 0  # of a feeder: which start of it this is

    @property
    def spec(self) -> RunSpec:
        """The run's spec."""
        return self.record.spec

    @property
    def run(self) -> str:
        """The run's id."""
        return self.record.id

    @property
    def name(self) -> str:
        """This process in messages for people."""
        return f"{self.role}-{self.instance}@{host_name()}"

    def wait(self, what: str, *, unblocked_by: str) -> Wait:
        """A wait that ends when nothing has moved anywhere for `deadlines.progress_s`."""
        return Wait(
            what, unblocked_by=unblocked_by, deadline_s=self.spec.deadlines.progress_s, signs=self.signs
        )

    def dead_letter(self, record: Record, reason: str, *, wanted: str = "") -> None:
        """Put a record that can't be used where people find it; the run goes on.

        `wanted`: the sample that it should have been, which the dispatcher shall have made again. A large
        record is named by its position alone: its letter has to fit too.
        """
        quoted = record.value if len(record.value) <= _LARGEST_QUOTED else b""
        letter = DeadLetter(
            run=self.run, topic=record.topic, partition=record.partition, offset=record.offset,
            reason=reason[:_LONGEST_REASON], raw=quoted,
            found_by=self.name, found_at=time.time(), wanted=wanted,
        )  # fmt: skip
        self.writer.send(
            self.topics.dead, encode(letter), key=f"{record.topic}/{record.partition}/{record.offset}"
        )
        self.heart.counters["dead_letters"] = self.heart.counters.get("dead_letters", 0) + 1
        self.log.warning("%s[%d]@%d goes to %s: %s", record.topic, record.partition, record.offset,
                         self.topics.dead.name, reason)  # fmt: skip

    def loaded(self) -> None:
        """All that stays is in memory: from now on look for garbage, and never again among that."""
        gc.freeze()
        gc.enable()

    def check_stop(self) -> None:
        """Raise Stopped if this process was told to stop."""
        if self.stop.is_set():
            raise Stopped


def connect(record: RunRecord, name: str) -> KafkaBus:
    """The bus of a run."""
    kafka = record.spec.placement.kafka
    return KafkaBus(
        record.bootstrap_servers, name=name, replication=kafka.replication,
        retention_hours=kafka.retention_hours, delivery_s=record.spec.deadlines.progress_s,
    )  # fmt: skip


def arguments(role: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """A role's command line."""
    parser = argparse.ArgumentParser(prog=f"python -m …{role}", description=f"The {role} of a run.")
    parser.add_argument("--store", required=True, help="object store of the run: s3://… or file://…")
    parser.add_argument("--run", required=True, help="id of the run, such as count-1")
    parser.add_argument("--instance", type=int, default=0, help="number of this process among its role")
    parser.add_argument("--model", help="folder of the starting model, if it is elsewhere on this machine")
    parser.add_argument("--reward", help="FILE.py:function, if the reward is elsewhere on this machine")
    parser.add_argument("--site", help="name of the site that it is at, if that is far from the object store")
    parser.add_argument("--cache", default="local", help="where that site keeps weights: a URL, or local")
    parser.add_argument("--share", default="0/1", help="of a relay: which of how many relays of its site")
    return parser.parse_args(argv)


def run_role(role: str, body: Callable[[Context], None], argv: Sequence[str] | None = None) -> int:
    """Open the run, call `body`, and end in an orderly way whatever happens; returns the exit code."""
    given = arguments(role, argv)
    log = set_up(given.run, f"{role}-{given.instance}")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    ended = threading.Event()
    context: Context | None = None
    try:
        store = open_store(given.store)
        record = find(store, given.run).here(given.model, given.reward)
        check_identity(store, record.store_id)
        bus = connect(record, f"{role}-{given.instance}")
        topics = Topics(record.id, record.spec.lengths.classes)
        if record.identity:
            check_owner(bus, record, topics)
        heart = Heart(record.id, role, given.instance)
        site = site_of(given.site, given.cache, given.share)
        context = Context(
            record, role, given.instance, store, bus, bus.writer(_batch(role)), topics, heart, stop, log, site
        )
        gc.disable()  # until all is loaded: seconds, when millions of objects come and none goes
        threading.Thread(target=_beats, args=(context, ended), daemon=True, name="heart").start()
        context.signs = _signs(context)
        body(context)
        return DONE
    except Stopped:
        log.info("told to stop")
        return STOPPED
    except Replaced as error:
        log.error("%s", error)
        return REPLACED
    except Explained as error:
        log.error("%s", error)
        return FAILED
    except Exception:
        log.exception("failed")
        return FAILED
    finally:
        ended.set()
        if context is not None:
            context.signs.close()
            _say_goodbye(context, log)
        sys.stdout.flush()


def _signs(context: Context) -> Signs:
    """The feeder hears everyone and says what moves; who waits for others hears that. A relay does not."""
    deadline_s = context.spec.deadlines.progress_s
    if context.role == "feeder":
        return Pulsing(context.bus, context.writer, context.topics, context.run, deadline_s=deadline_s)
    if context.role in ("generator", "trainer"):
        return Pulses(context.bus, context.topics, context.run, deadline_s=deadline_s)
    return NoSigns()


def _batch(role: str) -> int | None:
    """The feeder's prompts are fetched one by one, each with its batch: samples and the like are streamed."""
    return SMALL_BATCH if role == "feeder" else None


def _beats(context: Context, ended: threading.Event) -> None:
    steady_s = min(_STEADY_S, context.spec.deadlines.progress_s / 10)
    while not ended.wait(HEARTBEAT_S):
        try:
            if context.heart.is_due(steady_s):
                context.heart.beat(context.writer, context.topics)
        except BusError:
            return  # the role itself meets the same error and reports it
        except Exception:  # a beat that can't be made is missing; the next one may be made
            context.log.exception("a heartbeat can't be sent")


def _say_goodbye(context: Context, log: logging.Logger) -> None:
    try:
        context.heart.working("ended")
        context.heart.beat(context.writer, context.topics)
        context.writer.close()
    except BusError as error:
        log.warning("last heartbeat lost: %s", error)
