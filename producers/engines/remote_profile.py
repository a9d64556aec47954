"""The other end of the engine process that is profiled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from infra.supervise.quiet_child import ChildEnded, QuietChild
from infra.weights.patch import PatchFile
from producers.engines.engine import DrawnAnswer, EngineError, Pace
from producers.engines.engine_messages import EngineOptions, Paced, Ready, Refused
from producers.engines.profile_process import (
    DrawReport,
    EngineMemory,
    InstallTimes,
    ProfileOrder,
    TimedInstall,
)
from producers.engines.remote import answer_of
from producers.engines.step_timing import WAITING, StepTable, TimedDraw

_LATE_S = 60.0  # beyond the time that a draw may take
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    list[Paced | Ready | Refused | DrawReport | InstallTimes | EngineMemory]
).decode
_Report = TypeVar("_Report", Ready, DrawReport, InstallTimes, EngineMemory)


class ProfiledEngine:
    """An engine in a process of its own whose steps are timed."""

    def __init__(self, options: EngineOptions, env: Mapping[str, str], *, deadline_s: float) -> None:
        """`env`: variables that a generator of the run has. `deadline_s`: for a start, or new weights."""
        self._options, self._env, self._deadline = options, dict(env), deadline_s
        self.start_s = 0.0
        self.memory_tokens = 0
        self.pace = Pace([], [])  # of the profile that the engine itself makes at its start

    def open(self) -> ProfiledEngine:
        """Start the process; `wait_until_ready` waits for the engine. Return itself."""
        self._began = time.monotonic()
        self._child = QuietChild("producers.engines.profile_process", self._options, self._env).open()
        return self

    def wait_until_ready(self) -> None:
        """Wait until the engine takes orders. Raises EngineError if it does not start."""
        self._take(Ready, self._deadline)
        self.start_s = time.monotonic() - self._began
        self.memory_tokens = self._take(EngineMemory, self._deadline).memory_tokens

    def draw(self, order: TimedDraw) -> tuple[StepTable, list[DrawnAnswer]]:
        """Have samples drawn; return the steps, and the finished answers."""
        self.begin(order)
        return self.drawn(order)

    def begin(self, order: ProfileOrder) -> None:
        """Send an order."""
        self._child.send(_encode(order))

    def drawn(self, order: TimedDraw) -> tuple[StepTable, list[DrawnAnswer]]:
        """Wait for the result of a draw that was begun."""
        found = self._take(DrawReport, WAITING * order.most_s + _LATE_S + self._deadline)
        return found.table, [answer_of(one) for one in found.answers]

    def install(self, patch: PatchFile, *, recompute: bool = False) -> InstallTimes:
        """Install weights, and return how long that took."""
        self.begin(TimedInstall(file=str(patch.path), recompute=recompute))
        return self._take(InstallTimes, self._deadline)

    def close(self) -> None:
        """End the process."""
        self._child.close()

    def _take(self, kind: type[_Report], wait_s: float) -> _Report:
        """Return the next report of a kind."""
        until = time.monotonic() + wait_s
        try:
            while (data := self._child.receive(max(0.0, until - time.monotonic()))) is not None:
                for one in _decode(data):
                    if isinstance(one, Refused):
                        failed = EngineError(one.reason)
                        failed.lasting = one.lasting
                        raise failed
                    if isinstance(one, Paced):
                        self.pace = one.pace
                    if isinstance(one, kind):
                        return one
        except ChildEnded as ended:
            raise EngineError(f"the engine process {ended}") from None
        raise EngineError(f"the engine process took more than {wait_s:.0f} s")
