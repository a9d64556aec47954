"""Tells how long a thread was ready to run while other threads had the cores.

Times that are measured on a busy machine have these waits in them; without them they are about those of a
quiet machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_FILE = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, nanoseconds of waiting for one, turns


def waited_for_core_s() -> float:
    """Return the seconds that this thread has waited for a core; 0 where the system does not say."""
    try:
        with _FILE.open("rb", buffering=0) as file:
            return int(file.read(100).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass(frozen=True, slots=True)
class WorkTime:
    """The time of a piece of work: `seconds` without waits for a core, and those waits."""

    seconds: float
    waited_s: float


class WorkWatch:
    """Times pieces of the work of the thread that uses it."""

    def __init__(self) -> None:
        self.seconds, self.waited_s = 0.0, 0.0  # of all pieces
        self._cpu_s = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin a piece of work; all that came since the end of the last one does not count."""
        self._waits, self._cpu = waited_for_core_s(), time.process_time()
        self._since = time.perf_counter()

    def end(self) -> WorkTime:
        """End the piece of work, and return its time."""
        took = time.perf_counter() - self._since
        waited = min(max(0.0, waited_for_core_s() - self._waits), took)
        self._cpu_s += time.process_time() - self._cpu
        self.seconds += took - waited
        self.waited_s += waited
        return WorkTime(max(1e-9, took - waited), waited)

    @property
    def busy_cores(self) -> float:
        """The cores that all threads of this process kept busy meanwhile."""
        return self._cpu_s / max(1e-9, self.seconds)

    @property
    def disturbed(self) -> float:
        """The share of the time in which the thread waited for a core."""
        return self.waited_s / max(1e-9, self.seconds + self.waited_s)
