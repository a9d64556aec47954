"""Follows the generators by their reports: which ones are there, how fast they are, which ones are silent.

A report says what has changed since the one before. A generator that is not known here is first asked for a
full report, and is given nothing before that.
"""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from producers.dispatch import beat_s
from producers.dispatch.curve import CurveError, LatencyCurve, curve_of, flat
from producers.dispatch.dispatcher import Dispatcher
from producers.dispatch.on_the_way import GeneratorStart
from schemas.identity import sample_key
from schemas.messages import GeneratorReport

SLOW_LEFT_OUT_S = 20.0
_LOOK_S = 0.1  # how often silence is checked
_LONGEST_ROUND_S = 5.0  # from a finished sample to the next: what took longer lay somewhere
_NEWEST = 0.05  # weight of the newest sample's age
_WRONG_CLOCK_S = 3600.0  # a clock that is wrong by more is not believed
_FORMER = 4096


@dataclass
class _BoardGenerator:
    start: str
    heard_at: float
    slots: int
    curve: LatencyCurve
    table: np.ndarray
    said: tuple[list[int], list[float]] = field(default_factory=lambda: ([], []))  # of its curve
    silent_s: float = 0.0
    idle_s: float = 0.0  # while others had work
    # mean ages of samples when they come here, by both clocks, and of jobs when they could begin, by its own
    samples_late_s: float = 0.0
    jobs_late_s: float = 0.0

    @property
    def is_left_out(self) -> bool:
        """Whether it had no work for long while others had some."""
        return self.idle_s > SLOW_LEFT_OUT_S


class Fleet:
    """Tells the dispatcher of generators. `strangers`: those that have to send a full report."""

    def __init__(
        self, dispatcher: Dispatcher, log: logging.Logger, *, slots: int, silence_s: float, now: float
    ) -> None:
        """`slots`: how many a generator of this run has; one that claims more gets no more."""
        self._dispatcher, self._log, self._slots = dispatcher, log, slots
        self._silence_s, self._beat_s = silence_s, beat_s(silence_s)
        self._generators: dict[str, _BoardGenerator] = {}
        self._former: OrderedDict[GeneratorStart, None] = (
            OrderedDict()
        )  # processes that were replaced, or left
        self.strangers: dict[str, str] = {}
        self._fastest: np.ndarray | None = None  # None: to be found again
        self._looked_at = now

    def __len__(self) -> int:
        return len(self._generators)

    def process(self, name: str) -> GeneratorStart:
        """Return the name and start of the generator that has this name now."""
        return name, self._generators[name].start

    def is_known(self, name: str) -> bool:
        """Whether a generator of this name is there."""
        return name in self._generators

    def is_there(self, process: GeneratorStart) -> bool:
        """Whether this start of a generator is there."""
        known = self._generators.get(process[0])
        return known is not None and known.start == process[1]

    def heard(self, report: GeneratorReport, now: float) -> None:
        """Take a generator's report."""
        name, known = report.generator, self._generators.get(report.generator)
        if (name, report.start) in self._former:
            return
        if report.leaving:
            if known is not None and known.start == report.start:
                self._replaced(name, report.start)
                self._gone(name, "leaves", now)
            return
        if known is None or known.start != report.start:
            if not report.whole:
                self.strangers[name] = report.start
                return
            self._join(report, now)
        else:
            self._goes_on(report, known, now)
        if report.jobs_late_s:
            self._generators[name].jobs_late_s = _within(report.jobs_late_s)
        if report.whole:
            self._dispatcher.progress(
                name, {key: count for key, count in _held(report).items() if count >= 0}, now
            )
        self._dispatcher.returned(name, [sample_key(one) for one in report.returned], now)

    def finished(self, name: str, age_s: float) -> None:
        """Note how long ago a generator finished a sample that came now, by its clock and ours.

        If its clock is wrong, that and the age of jobs are wrong by the same, one more and one less.
        """
        if (known := self._generators.get(name)) is None:
            return
        weight = _NEWEST if known.samples_late_s else 1.0
        known.samples_late_s += weight * (_within(age_s) - known.samples_late_s)
        if known.jobs_late_s:
            round_s = known.samples_late_s + known.jobs_late_s
            self._dispatcher.delayed(name, min(_LONGEST_ROUND_S, max(0.0, round_s)))

    def _join(self, report: GeneratorReport, now: float) -> None:
        name = report.generator
        if (known := self._generators.get(name)) is not None:
            self._replaced(name, known.start)
        self.strangers.pop(name, None)
        slots = min(report.slots, self._slots)
        curve = self._curve(report, flat())
        fresh = _BoardGenerator(report.start, now, slots, curve, curve.table(slots), _said(report))
        held = _held(report)
        self._generators[name] = fresh
        self._fastest = None
        self._dispatcher.join(name, slots, fresh.table, now, keeps_bits=report.keeps_bits)
        self._dispatcher.adopt(name, held)
        self._log.info("%s has come: it has %d slots, and %d samples to make", name, slots, len(held))

    def _goes_on(self, report: GeneratorReport, known: _BoardGenerator, now: float) -> None:
        name, was_left_out = report.generator, known.is_left_out
        passed, known.heard_at, known.silent_s = now - known.heard_at, now, 0.0
        is_idle = self._dispatcher.given > 0 and not self._dispatcher.works(name)
        known.idle_s = known.idle_s + passed if is_idle else 0.0
        is_new = bool(report.batches) and _said(report) != known.said
        if is_new:
            known.said = _said(report)
            known.curve = self._curve(report, known.curve)
            known.table = known.curve.table(known.slots)
            self._fastest = None
        if is_new or known.is_left_out != was_left_out:
            self._dispatcher.measured(name, self._steps(known), now)

    def _steps(self, generator: _BoardGenerator) -> np.ndarray:
        """Return how long a generator's steps take.

        One that was left out for long counts as at least as fast as any other: its measurements are old, and
        without work it makes no new ones.
        """
        table = generator.table
        if generator.is_left_out:
            fastest = self._fastest_steps()[: len(table)]
            table = np.concatenate([np.minimum(table[: len(fastest)], fastest), table[len(fastest) :]])
        return table

    def _fastest_steps(self) -> np.ndarray:
        """Return the seconds of the fastest step of any generator, by the number of samples in it."""
        if self._fastest is None:
            self._fastest = np.full(max(len(one.table) for one in self._generators.values()), np.inf)
            for one in self._generators.values():
                mine = self._fastest[: len(one.table)]
                np.minimum(mine, one.table, out=mine)
        return self._fastest

    def _curve(self, report: GeneratorReport, otherwise: LatencyCurve) -> LatencyCurve:
        if not report.batches:
            return otherwise
        try:
            return curve_of(report.batches, report.seconds)
        except CurveError as error:
            self._log.warning("%s reports step times that can't be right: %s", report.generator, error)
            return otherwise

    def bury_the_silent(self, now: float) -> None:
        """Remove generators that were silent for too long. Silence counts only while another one is heard."""
        passed = now - self._looked_at
        if passed < _LOOK_S:
            return
        self._looked_at = now
        newest = heapq.nlargest(2, ((one.heard_at, name) for name, one in self._generators.items()))
        for name, generator in list(self._generators.items()):
            others = [heard_at for heard_at, other in newest if other != name]
            if others and now - others[0] < 2.5 * self._beat_s:
                generator.silent_s += min(passed, now - generator.heard_at)
            if generator.silent_s > self._silence_s:
                self._gone(name, f"was not heard of for {self._silence_s:g} s", now)

    def _gone(self, name: str, why: str, now: float) -> None:
        del self._generators[name]
        self._fastest = None
        lost = self._dispatcher.leave(name, now)
        self._log.info("%s %s: the %d samples that it had are given to others", name, why, lost)

    def _replaced(self, name: str, start: str) -> None:
        self._former[name, start] = None
        if len(self._former) > _FORMER:
            self._former.popitem(last=False)


def _within(age_s: float) -> float:
    return min(_WRONG_CLOCK_S, max(-_WRONG_CLOCK_S, age_s))


def _said(report: GeneratorReport) -> tuple[list[int], list[float]]:
    return report.batches, report.seconds


def _held(report: GeneratorReport) -> dict[tuple[int, int], int]:
    """Return the samples that a generator has, with their tokens."""
    keys = zip(report.groups.tolist(), report.indexes.tolist(), strict=True)
    return dict(zip(keys, report.tokens.tolist(), strict=True))
