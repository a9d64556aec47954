"""Writes a generator's reports to `<run>.instances`: no more often and no longer than the dispatcher needs.

whole    all that it has, and how many tokens each: at the start, when it is asked, and now and then while it
         works, the rarer the larger it is
else     that it is there; a curve, if it has changed; what it gives back, at once
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from infra.roles.context import RoleContext
from producers.dispatch import REPORT_BYTES_PER_S, beat_s
from producers.engines.engine import Pace
from schemas.identity import SampleKey
from schemas.messages import GeneratorReport
from schemas.wire import encode

_CHANGED = 0.05  # a latency curve that differs by a smaller share counts as unchanged
_SETTLES_S = 10.0  # least time between two reports of a curve
_NEWEST = 0.1  # weight of the newest assignment's age


@dataclass(frozen=True)
class GeneratorState:
    """A generator's state, for a report."""

    pace: Pace
    version: int
    held: Sequence[tuple[SampleKey, int]]  # unfinished samples, with their tokens; -1: not begun


class GeneratorReports:
    """Writes the reports of one generator."""

    def __init__(self, context: RoleContext, start: str, now: Callable[[], float] = time.monotonic) -> None:
        self._context, self._start, self._now = context, start, now
        self._beat_s = beat_s(context.spec.dispatch.silence_s)
        self._beat_at = self._whole_at = self._curve_at = 0.0  # when the next report of each kind is due
        self._said = Pace([], [])
        self._returned: list[str] = []
        self._jobs_late_s = 0.0

    def tell(self) -> None:
        """Make the next report a whole one, at once: the dispatcher asked for it."""
        self._beat_at = self._whole_at = 0.0
        self._said = Pace([], [])
        self._curve_at = 0.0

    def took(self, age_s: float) -> None:
        """Note how old an assignment was when its jobs could begin."""
        self._jobs_late_s += (_NEWEST if self._jobs_late_s else 1.0) * (age_s - self._jobs_late_s)

    def gives_back(self, names: list[str]) -> None:
        """Report these returned samples at once.

        The dispatcher waits for an answer even if there are none.
        """
        self._returned += names
        self._beat_at = 0.0

    def report(self, state: Callable[[], GeneratorState], *, leaving: bool = False, handed: int = 0) -> None:
        """Send a report, if one is due. `leaving`: send a last, whole one now."""
        now = self._now()
        if now < self._beat_at and not leaving:
            return
        found = state()
        whole = leaving or self._whole_at == 0.0 or (now >= self._whole_at and bool(found.held))
        pace = self._fresh(found.pace, now)
        held = found.held if whole else []
        message = encode(
            GeneratorReport(
                run=self._context.run, generator=self._context.name, start=self._start,
                slots=self._context.spec.generator.slots, batches=pace.batches, seconds=pace.seconds,
                version=found.version, groups=np.array([key[0] for key, _ in held], np.int64),
                indexes=np.array([key[1] for key, _ in held], np.int16),
                tokens=np.array([count for _, count in held], np.int32),
                returned=self._returned, leaving=leaving, handed=handed, sent_at=time.time(), whole=whole,
                keeps_bits=found.pace.keeps_bits, jobs_late_s=self._jobs_late_s,
            )
        )  # fmt: skip
        self._returned = []
        self._beat_at = now + self._beat_s
        if whole:
            self._whole_at = now + max(self._beat_s, len(message) / REPORT_BYTES_PER_S)
        self._context.writer.send(self._context.topics.generators, message, key=self._context.name)

    def _fresh(self, pace: Pace, now: float) -> Pace:
        """Return the latency curve if it is due and has changed; else an empty one."""
        if now < self._curve_at or not _differ(pace, self._said):
            return Pace([], [])
        self._said, self._curve_at = pace, now + _SETTLES_S
        return pace


def _differ(one: Pace, other: Pace) -> bool:
    if one.batches != other.batches:
        return True
    return any(abs(new - old) > _CHANGED * old for new, old in zip(one.seconds, other.seconds, strict=True))
