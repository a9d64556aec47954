"""An engine without a model: sample lengths and step times are given. Time is real or virtual.

The paper measured itself like this. It serves to test and plan dispatch at scales beyond any test.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from infra.weights.bits import Bits
from infra.weights.digest import model_digests
from infra.weights.patch import Patch, PatchFile
from producers.engines.engine import DrawnAnswer, EngineError, Installed, Pace, SampleRequest


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the time in seconds."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class RealClock:
    """The machine's clock. The bell ends a sleep, as with an engine in a process of its own."""

    def __init__(self, bell: threading.Event) -> None:
        self._bell = bell

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._bell.wait(seconds)
        self._bell.clear()


class VirtualClock:
    """A clock that stands still until its `time` is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        """Do nothing: virtual time does not pass by itself."""


class ReplayEngine:
    """Finishes a request after as many steps as its length. A step takes `seconds[batch]`."""

    def __init__(
        self,
        seconds: np.ndarray,
        length_of: Callable[[SampleRequest], int],
        clock: Clock,
        *,
        prefill_s: float = 0.0,
    ) -> None:
        self._seconds, self._length_of, self._clock = seconds, length_of, clock
        self._prefill_s = prefill_s  # for each token of a prompt; nothing else is computed meanwhile
        self._slots = len(seconds) - 1
        self._waiting: list[tuple[float, int, SampleRequest]] = []
        self._running: list[
            tuple[float, int, int, SampleRequest]
        ] = []  # by the step at which each ends: length
        self._count = 0
        self._steps, self._at = 0.0, clock.now()
        self._ended: list[tuple[SampleRequest, int]] = []
        self._model: dict[str, Bits] = {}
        self._root: str | None = None
        self._prepared: Patch | None = None
        self._rests = False

    def submit(self, request: SampleRequest) -> None:
        self._advance()
        self._count += 1
        heapq.heappush(self._waiting, (-request.priority, self._count, request))
        self._fill()

    def step(self, wait_s: float) -> list[DrawnAnswer]:
        self._advance()
        if not self._ended:
            self._clock.sleep(max(0.0, min(wait_s, self.next_end() - self._clock.now())))
            self._advance()
        ended, self._ended = self._ended, []
        return [
            DrawnAnswer(request.id, np.zeros(length, np.int32), np.zeros(length, np.float32), "stop")
            for request, length in ended
        ]

    def next_end(self) -> float:
        """Return when the next sample will be done, if no request comes before."""
        return self._clock.now() if self._ended else self._soonest()

    def _soonest(self) -> float:
        if not self._running or self._rests:
            return float("inf")
        return self._at + (self._running[0][0] - self._steps) * float(self._seconds[len(self._running)])

    def abort(self, ids: Sequence[str]) -> None:
        self._advance()
        gone = set(ids)
        self._waiting = [entry for entry in self._waiting if entry[2].id not in gone]
        self._running = [entry for entry in self._running if entry[-1].id not in gone]
        heapq.heapify(self._waiting)
        heapq.heapify(self._running)
        self._fill()

    def unfinished(self) -> dict[str, int]:
        self._advance()
        running = {
            request.id: round(length - (end - self._steps)) for end, _, length, request in self._running
        }
        return running | {request.id: 0 for _, _, request in self._waiting}

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        made = self.unfinished()
        mine = [name for name in ids if name in made]
        self.abort(mine)
        return [
            DrawnAnswer(name, np.zeros(made[name], np.int32), np.zeros(made[name], np.float32))
            for name in mine
        ]

    def prepare(self, patch: PatchFile) -> None:
        self._prepared = patch.read()

    def is_ready(self) -> bool:
        return self._prepared is not None

    def install(self, *, recompute: bool) -> Installed:
        """Take the weights: `digests` hashes them, and nothing is computed with them."""
        assert self._prepared is not None, "nothing is prepared"
        if self._prepared.since not in (None, self._root):
            raise EngineError(
                f"the patch is for the weights {self._prepared.since}; the engine holds {self._root}"
            )
        self._prepared.apply(self._model)
        self._root, self._prepared = self._prepared.root, None
        tokens = self.unfinished()
        if recompute:
            prompts = sum(len(request.prompt) for *_, request in self._running)
            self._at += self._prefill_s * (prompts + sum(tokens.values()))
        return Installed(tokens, 0.0)

    def rest(self) -> None:
        self._advance()
        self._rests = True

    def go_on(self) -> None:
        self._advance()
        self._rests = False

    def digests(self) -> dict[str, str]:
        return model_digests(self._model)

    def pace(self) -> Pace:
        sizes = list(range(1, self._slots + 1))
        return Pace(sizes, [float(self._seconds[size]) for size in sizes], keeps_bits=True)

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _advance(self) -> None:
        """Move on to the present time. Each freed slot is filled at the moment at which it became free."""
        now = self._clock.now()
        while self._running and (moment := self._soonest()) <= now + 1e-9:
            self._steps, self._at = self._running[0][0], max(moment, self._at)
            while self._running and self._running[0][0] <= self._steps + 1e-6:
                _, _, length, request = heapq.heappop(self._running)
                self._ended.append((request, length))
            self._fill()
        if self._running and not self._rests and now > self._at:
            self._steps += (now - self._at) / float(self._seconds[len(self._running)])
        self._at = max(now, self._at)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            _, number, request = heapq.heappop(self._waiting)
            length = self._length_of(request) - len(request.made)
            self._at += self._prefill_s * (len(request.prompt) + len(request.made))
            heapq.heappush(self._running, (self._steps + length, number, length, request))
