"""An engine without a model: sample lengths and step times are given. Time is real or virtual.

The paper measured itself like this. It serves to test and plan dispatch at scales beyond any test.
"""

from __future__ import annotations

import heapq
import math
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


_SAME_STEP = 1e-6  # of a step: ends and beginnings that are no further apart fall together
_LONGEST = 1 << 15  # longer answers have arrays of their own
_TOKENS, _LOGPROBS = np.zeros(_LONGEST, np.int32), np.zeros(_LONGEST, np.float32)
for _shared in (_TOKENS, _LOGPROBS):
    _shared.setflags(write=False)


def _tokens(length: int) -> np.ndarray:
    return _TOKENS[:length] if length <= _LONGEST else np.zeros(length, np.int32)


def _logprobs(length: int) -> np.ndarray:
    return _LOGPROBS[:length] if length <= _LONGEST else np.zeros(length, np.float32)


class ReplayEngine:
    """Finishes a request after as many steps as its length.

    A step takes `seconds[batch]`, and `context_s` more for each token of prompt and answer that its samples
    attend to. So many steps take a time that is quadratic in their number: no step is counted by itself.
    """

    def __init__(
        self,
        seconds: np.ndarray,
        length_of: Callable[[SampleRequest], int],
        clock: Clock,
        *,
        prefill_s: float = 0.0,
        fill_s: float = 0.0,
        context_s: float = 0.0,
        install_s: float = 0.0,
        late_steps: float = 0.0,
    ) -> None:
        """`install_s`: without a step while new weights replace others. `fill_s`: of a step in which any
        sample begins, besides `prefill_s` for each token of its prompt. `late_steps`: that an engine makes
        while a request is on its way to it; the request takes a slot meanwhile, and begins with a step.
        """
        self._seconds, self._length_of, self._clock = seconds, length_of, clock
        self._prefill_s = prefill_s  # for each token of a prompt; nothing else is computed meanwhile
        self._fill_s, self._filled_at = fill_s, -1.0  # the step at which a sample began last
        self._context_s, self._install_s, self._late_steps = context_s, install_s, late_steps
        self._slots = len(seconds) - 1
        self._waiting: list[tuple[float, int, SampleRequest]] = []
        self._running: list[
            tuple[float, int, int, SampleRequest]
        ] = []  # by the step at which each ends: length
        self._count = 0
        self._steps, self._at = 0.0, clock.now()
        self._idle_until = 0.0  # the step before which no sample ran
        self._began = 0.0  # sum over running samples: tokens that each attends to, less `_steps`
        self._speed, self._held_s = 1.0, 0.0  # work in a second; and, at speed 0, that comes before any step
        self._seen = clock.now()
        self._installing_s = 0.0  # work of installing that is left
        self._ended: list[tuple[SampleRequest, int]] = []
        self._model: dict[str, Bits] = {}
        self._root: str | None = None
        self._prepared: Patch | None = None
        self._awake_speed = 1.0  # to go on with after a rest

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
            DrawnAnswer(request.id, _tokens(length), _logprobs(length), "stop") for request, length in ended
        ]

    def next_end(self) -> float:
        """Return when the next sample will be done, if no request comes before."""
        return self._clock.now() if self._ended else self._soonest()

    def _soonest(self) -> float:
        if not self._running or not self._speed:
            return float("inf")
        return self._at + self._work_of(self._running[0][0] - self._steps) / self._speed

    def _work_of(self, steps: float) -> float:
        """Return the seconds of so many steps with the samples that run now, at full speed."""
        batch = len(self._running)
        step_s = float(self._seconds[batch])
        if not self._context_s:
            return steps * step_s
        return steps * (step_s + self._context_s * (self._attended() + batch * steps / 2))

    def _steps_in(self, work_s: float) -> float:
        """Return the steps that so many seconds at full speed are enough for: the inverse of `_work_of`."""
        batch = len(self._running)
        step_s = float(self._seconds[batch])
        if not self._context_s:
            return work_s / step_s
        first, growth = step_s + self._context_s * self._attended(), self._context_s * batch
        return 2 * work_s / (first + math.sqrt(first * first + 2 * growth * work_s))

    def _attended(self) -> float:
        """Return how many tokens the running samples attend to.

        A step that draws token j attends to the prompt and j - 1 tokens. Over whole steps their sum is that
        of a quantity which grows evenly, from half a token less.
        """
        return max(0.0, self._began + len(self._running) * (self._steps - 0.5))

    def set_speed(self, speed: float) -> None:
        """Go on at so much of the full speed, 0 to 1: other work shares the processor from now on."""
        self._advance()
        now = self._clock.now()
        left_s = self._held_s + max(0.0, self._at - now) * self._speed
        self._speed, self._held_s = speed, 0.0 if speed else left_s
        self._at = now + (left_s / speed if speed else 0.0)

    def _stand_still(self, work_s: float) -> None:
        """Make no step for so many seconds of work."""
        if self._speed:
            self._at += work_s / self._speed
        else:
            self._held_s += work_s

    def standing_still(self) -> tuple[float, float]:
        """Return for how many seconds from now no step is made: to install weights, and to prefill."""
        if not self._speed:
            return 0.0, 0.0
        left_s = max(0.0, self._at - self._clock.now())
        installing_s = min(left_s, self._installing_s / self._speed)
        return installing_s, left_s - installing_s

    def _note_standstill(self, now: float) -> None:
        """Count for how long no step was made since the last call, first for installing."""
        if self._installing_s:
            stood_s = max(0.0, min(now, self._at) - self._seen)
            self._installing_s = max(0.0, self._installing_s - stood_s * self._speed)
        self._seen = max(now, self._seen)

    def abort(self, ids: Sequence[str]) -> None:
        self._advance()
        gone = set(ids)
        self._waiting = [entry for entry in self._waiting if entry[2].id not in gone]
        self._began -= sum(self._attends(entry) for entry in self._running if entry[-1].id in gone)
        self._running = [entry for entry in self._running if entry[-1].id not in gone]
        heapq.heapify(self._waiting)
        heapq.heapify(self._running)
        self._fill()

    @staticmethod
    def _attends(entry: tuple[float, int, int, SampleRequest]) -> float:
        """Return the tokens that a running sample attends to, less the steps made."""
        end, _, length, request = entry
        return max(1, len(request.prompt) + len(request.made)) - (end - length)

    def unfinished(self) -> dict[str, int]:
        self._advance()
        running = {
            request.id: max(0, round(length - (end - self._steps)))
            for end, _, length, request in self._running
        }
        return running | {request.id: 0 for _, _, request in self._waiting}

    def hand_over(self, ids: Sequence[str]) -> list[DrawnAnswer]:
        made = self.unfinished()
        mine = [name for name in ids if name in made]
        self.abort(mine)
        return [DrawnAnswer(name, _tokens(made[name]), _logprobs(made[name])) for name in mine]

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
        tokens = self.unfinished()
        if self._root is not None and self._install_s:
            self._installing_s += self._install_s
            self._stand_still(self._install_s)
        self._root, self._prepared = self._prepared.root, None
        if recompute:
            prompts = sum(len(request.prompt) for *_, request in self._running)
            self._stand_still(self._prefill_s * (prompts + sum(tokens.values())))
        return Installed(tokens, 0.0)

    def rest(self) -> None:
        self._awake_speed = self._speed
        self.set_speed(0.0)

    def go_on(self) -> None:
        self.set_speed(self._awake_speed)

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
        self._note_standstill(now)
        while self._running and (moment := self._soonest()) <= now + 1e-9:
            self._steps, self._at = self._running[0][0], max(moment, self._at)
            while self._running and self._running[0][0] <= self._steps + _SAME_STEP:
                entry = heapq.heappop(self._running)
                self._began -= self._attends(entry)
                self._ended.append((entry[-1], entry[2]))
            self._fill()
        if self._running and now > self._at:
            self._steps += self._steps_in((now - self._at) * self._speed)
        self._at = max(now, self._at)

    def _begins(self) -> float:
        """Return the step after which a request that comes now is drawn."""
        if not self._late_steps:
            return self._steps
        next_step = float(math.ceil(self._steps - _SAME_STEP))
        if not self._running:
            self._steps = self._idle_until = next_step
        return next_step if next_step == self._idle_until else next_step + self._late_steps

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            _, number, request = heapq.heappop(self._waiting)
            length = self._length_of(request) - len(request.made)
            self._stand_still(self._prefill_s * (len(request.prompt) + len(request.made)))
            begins = self._begins()
            if begins - self._filled_at > _SAME_STEP:
                self._filled_at = begins
                self._stand_still(self._fill_s)
            entry = begins + length, number, length, request
            self._began += self._attends(entry)
            heapq.heappush(self._running, entry)
