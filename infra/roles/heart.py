"""A process's heartbeat, which says on `<run>.status` what the process does."""

from __future__ import annotations

import os
import time

from infra.bus import Writer
from infra.machine_use import machine_cpu_s
from infra.roles.causes import Causes
from infra.runs import host_name
from infra.supervise import children
from infra.weights import spent
from schemas.messages import WAIT, Heartbeat
from schemas.topics import Topics
from schemas.wire import encode

HEARTBEAT_S = 0.5  # between heartbeats, at least: one is sent soon after the state has changed
STEADY_S = 2.0  # between heartbeats while the state stays


class Heart:
    """The state and counters of this process, and the heartbeats on `<run>.status` that report them."""

    def __init__(self, run: str, role: str, number: int) -> None:
        self._run, self._role, self._number = run, role, number
        self._state, self._waits_for, self._unblocked_by = "starting", "", ""
        self._since = time.monotonic()
        self._work_s = 0.0
        self._said: tuple[str, str] = ("", "")  # state and wait, as they were sent last
        self._said_at = 0.0
        self.counters: dict[str, float] = {}
        self.trouble = ""  # for people who watch; at most 1,000 characters
        self._causes = Causes(self._state)

    def working(self, state: str, *, cause: str = "") -> None:
        """Note that the process works now; `state` says at what.

        `cause`: a name without numbers under which the time is counted, if the state is no such name.
        """
        self._causes.begin(cause or state)
        if self._waits_for or self._state != state:
            self._switch(state, "", "")

    def waiting(self, what: str, *, unblocked_by: str, cause: str = "") -> None:
        """Note that the process waits now; the time counts as idle. `cause`: as for `working`."""
        self._causes.begin(f"{WAIT}{cause or what}")
        if self._waits_for != what:
            self._switch("waiting", what, unblocked_by)

    def recount(self, cause: str, seconds: float) -> None:
        """Count the last `seconds`, which have just been measured, for a cause of their own."""
        self._causes.recount(cause, seconds)

    def _switch(self, state: str, waits_for: str, unblocked_by: str) -> None:
        now = time.monotonic()  # the other clock may be set meanwhile
        if self._waits_for:
            self.counters["idle_s"] = self.counters.get("idle_s", 0.0) + now - self._since
        self._state, self._waits_for, self._unblocked_by, self._since = state, waits_for, unblocked_by, now

    def message(self) -> Heartbeat:
        """Return a heartbeat that says how the process is now."""
        now = time.time()
        return Heartbeat(
            run=self._run, role=self._role, number=self._number, pid=os.getpid(), host=host_name(),
            state=self._state, waits_for=self._waits_for, unblocked_by=self._unblocked_by,
            since=now - (time.monotonic() - self._since), sent_at=now,
            counters=dict(self.counters) | self._used(), trouble=self.trouble,
            causes=self._causes.seconds(),
        )  # fmt: skip

    def _used(self) -> dict[str, float]:
        """Return processor seconds: the process's own, its work, those on weights, and the whole machine's.

        Work is its own seconds and its children's, as of the last time that the process did not wait.
        """
        own, machine = time.process_time(), machine_cpu_s()
        if not self._waits_for:
            self._work_s = own + children.cpu_s()
        found = {"cpu_s": own, "work_s": self._work_s, "weights_cpu_s": spent.seconds()}
        return found if machine is None else found | {"machine_cpu_s": machine}

    def is_due(self, steady_s: float = STEADY_S) -> bool:
        """Return whether to send a heartbeat: the state has changed, or `steady_s` seconds have passed."""
        changed = self._said != (self._state, self._waits_for)
        return changed or time.monotonic() - self._said_at >= steady_s

    def beat(self, writer: Writer, topics: Topics) -> None:
        """Send a heartbeat."""
        self._said, self._said_at = (self._state, self._waits_for), time.monotonic()
        writer.send(topics.status, encode(self.message()), key=f"{self._role}-{self._number}")
