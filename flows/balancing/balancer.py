"""Decides how many units the generating side should have. Pure: it sees figures, and starts nothing.

seconds of both sides, ─► averaged over the ─► grow:   δ ≥ δ′, and δ′ is worth it ─┐ so many iterations
by iteration              newest ones          shrink: one fewer keeps up, too    ─┘ in a row: a change
                              ▲                                                              │
                              └── begins anew, once the change can be seen ◄─────────────────┘

δ = T_gen - T_train; δ′ = what one unit more would save of T_gen. A unit is whatever is added and removed as
one: a generator of a run, or a machine of a simulated one. Growing by δ ≥ δ′ (the StreamRL paper's rule)
never makes the trainer the slower side, so a load that stays makes it grow or shrink, not both. Noise could:
so shrinking needs a margin above the noise that was seen, and each change back under the same load doubles
it. That bounds the number of changes that a constant load can cause, whatever its noise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from schemas.balancing import BalanceSection

OTHER_LOAD = 1.5  # a load that is so many times another one is not the same with some noise
_SURE = 2.0  # standard errors below which a measured saving has to be, to be called too small


@dataclass(frozen=True)
class Verdict:
    """The outcome of one iteration: the number of units that there should be, and why."""

    iteration: int
    gen_s: float  # both sides' times, smoothed
    train_s: float
    gain_s: float  # δ′: seconds that one unit more would save, as estimated
    before: int
    after: int
    reason: str

    @property
    def delta_s(self) -> float:
        """δ: how much longer the generating side takes."""
        return self.gen_s - self.train_s

    @property
    def change(self) -> int:
        """Units to add; below 0: to remove; 0: it stays as it is."""
        return self.after - self.before


@dataclass(frozen=True)
class _Seen:
    """One iteration's figures: seconds, also with one unit more and one fewer, and tokens."""

    gen_s: float
    train_s: float
    more_s: float
    fewer_s: float
    tokens: float | None

    @property
    def token_s(self) -> float | None:
        return self.gen_s / self.tokens if self.tokens else None


@dataclass(frozen=True)
class _Load:
    """A load, to tell a change of it from noise."""

    work_s: float  # unit-seconds of generation
    train_s: float

    def is_other(self, than: _Load) -> bool:
        return _ratio(self.work_s, than.work_s) >= OTHER_LOAD or (
            _ratio(self.train_s, than.train_s) >= OTHER_LOAD
        )


class _Noise:
    """How much the ratio of the two times varies from one iteration to the next, in log units.

    A median of differences: a load that jumps, or lengths that grow, are not taken for noise.
    """

    _NEWEST, _FEWEST = 31, 4
    _TO_DEVIATION = 1 / (0.6745 * math.sqrt(2))  # of normal values, from their median absolute difference

    def __init__(self, smoothed: int) -> None:
        self._smoothed = smoothed
        self._before: float | None = None
        self._differences: deque[float] = deque(maxlen=self._NEWEST)

    def add(self, gen_s: float, train_s: float, *, anew: bool) -> None:
        """Note an iteration. `anew`: the one before was of another number of units."""
        now = math.log(gen_s / train_s) if gen_s > 0 and train_s > 0 else None
        if now is not None and self._before is not None and not anew:
            self._differences.append(abs(now - self._before))
        self._before = now

    @property
    def error(self) -> float:
        """The standard error of the ratio of two averages; 0 while too little is known."""
        if len(self._differences) < self._FEWEST:
            return 0.0
        return median(self._differences) * self._TO_DEVIATION / math.sqrt(self._smoothed)


class Balancer:
    """Sees the iterations of a run in order, and gives a verdict after each."""

    def __init__(self, rule: BalanceSection, past: Sequence[Verdict] = ()) -> None:
        """`past`: the changes that were made before a resume; the caution learned from them is kept."""
        self._rule = rule
        self._seen: deque[_Seen] = deque(maxlen=rule.smoothed)
        self._noise = _Noise(rule.smoothed)
        self._units: int | None = None
        self._wanted: int | None = None  # a change that is not seen yet
        self._skip = 0  # iterations that are not judged
        self._in_a_row, self._direction = 0, 0
        self._last: tuple[int, _Load] | None = None  # direction of the last change, and its load
        self._reversals, self._reversed_at = 0, _Load(0.0, 0.0)
        self._before_growth: list[float] = []  # seconds a token, of the iterations before the last growth
        self._ceiling: tuple[int, _Load] | None = None  # more units than that did not help, under that load
        for one in past:
            self._note(one.change, _Load(one.gen_s * one.before, one.train_s))

    def observe(
        self, iteration: int, gen_s: float, train_s: float, units: int, *, more_s: float | None = None,
        fewer_s: float | None = None, tokens: float | None = None,
    ) -> Verdict:  # fmt: skip
        """Take an iteration's figures, and say whether the number of units should change.

        `gen_s`, `train_s`: what each side takes if it never waits for the other. `more_s`, `fewer_s`: `gen_s`
        with one unit more and one fewer; by default a unit does an equal share of the work. `tokens`: of the
        iteration, to see what a new unit has really saved.
        """
        if not (units >= 0 and 0 <= gen_s < math.inf and 0 <= train_s < math.inf):
            raise ValueError(f"{units} units and {gen_s} and {train_s} s are no figures of an iteration")
        more = gen_s * units / (units + 1) if more_s is None else min(more_s, gen_s)
        fewer = gen_s * units / max(1, units - 1) if fewer_s is None else max(fewer_s, gen_s)
        now = _Seen(gen_s, train_s, more, fewer, tokens)
        if why := self._not_yet(units):
            return Verdict(iteration, gen_s, train_s, gen_s - more, units, units, why)
        self._noise.add(gen_s, train_s, anew=not self._seen)
        self._seen.append(now)
        return self._judge(iteration, units)

    @property
    def wanted(self) -> int | None:
        """The number of units that was asked for and is not seen yet."""
        return self._wanted

    def give_up(self) -> None:
        """Wait no longer for the change that was asked for last: the next iteration is judged as it is."""
        self._wanted, self._before_growth = None, []
        self._seen.clear()

    def _not_yet(self, units: int) -> str:
        """Say why this iteration is not judged; empty: it is."""
        if self._wanted is not None:
            if units != self._wanted:
                return f"{self._wanted} generators were asked for, and {units} are there"
            self._begin_anew(units)
            self._wanted = None
        if units != self._units:
            if self._units is not None:  # one died, or somebody started one
                self._before_growth = []
                self._begin_anew(units)
            self._units = units
        if self._skip > 0:
            self._skip -= 1
            return f"the number of generators has just changed to {units}"
        return ""

    def _begin_anew(self, units: int) -> None:
        self._units, self._skip, self._in_a_row = units, self._rule.settle, 0
        self._seen.clear()

    def _judge(self, iteration: int, units: int) -> Verdict:
        gen, train = (fmean(getattr(one, name) for one in self._seen) for name in ("gen_s", "train_s"))
        more, fewer = (fmean(getattr(one, name) for one in self._seen) for name in ("more_s", "fewer_s"))
        load = _Load(gen * units, train)
        direction, why = self._called_for(units, gen, train, more, fewer, load)
        self._in_a_row = self._in_a_row + 1 if direction == self._direction else 1
        self._direction = direction
        if direction and self._in_a_row < self._rule.lasting:
            why = f"{why}; for {self._in_a_row} of {self._rule.lasting} iterations so far"
            direction = 0
        verdict = Verdict(iteration, gen, train, gen - more, units, units + direction, why)
        if direction:
            self._note(direction, load)
            self._in_a_row = 0
            if not self._rule.dry:  # else nothing follows
                self._before_growth = self._token_times() if direction > 0 else []
                self._wanted = verdict.after
        return verdict

    def _called_for(
        self, units: int, gen: float, train: float, more: float, fewer: float, load: _Load
    ) -> tuple[int, str]:
        """Return the change that the newest iterations call for, and why."""
        rule, delta, gain = self._rule, gen - train, gen - more
        times = f"generating takes {_s(gen)} an iteration and training {_s(train)}"
        if units < rule.least:
            return 1, f"{units} generators are fewer than least ({rule.least})"
        if units > rule.most:
            return -1, f"{units} generators are more than most ({rule.most})"
        if units > rule.least and (why := self._in_vain(units)):
            return -1, why
        if delta >= gain and delta > 0:
            saves = f"one generator more saves {_s(gain)} of the difference of {_s(delta)}"
            if units >= rule.most:
                return 0, f"{times}, and most ({rule.most}) generators are there"
            if gain < rule.worth * gen:
                return 0, f"{times}, but {saves}: less than worth ({rule.worth:.0%} of generation)"
            if (
                self._ceiling is not None
                and units >= self._ceiling[0]
                and not load.is_other(self._ceiling[1])
            ):
                return 0, f"{times}, but generator {units + 1} saved nothing before, under the same load"
            return 1, f"{times}: {saves}"
        margin = max(self._margin(load), 1 - (1 - rule.margin) * math.exp(-_SURE * self._noise.error))
        if units > rule.least and fewer <= train * (1 - margin):
            return -1, (
                f"{times}: with one generator less it would take {_s(fewer)}, which is at least "
                f"{margin:.0%} less than training"
            )
        if delta > 0:
            return 0, f"{times}: one generator more would make the trainer the slower side"
        return 0, f"{times}: " + (
            "one generator less would make generating the slower side"
            if units > rule.least
            else f"least ({rule.least}) generators are there"
        )

    def _in_vain(self, units: int) -> str:
        """Say that the newest unit has saved next to nothing; empty: it has, or that is not known."""
        before, now = self._before_growth, self._token_times()
        if not before or self._last is None or len(now) < self._rule.lasting:
            return ""
        first, second = fmean(before), fmean(now)
        saved, doubt = 1 - second / first, _SURE * math.hypot(_error(before), _error(now))
        if saved + doubt >= self._rule.worth:
            self._before_growth = []  # it was worth it; from now on lengths may change the rate, too
            return ""
        self._ceiling = units - 1, self._last[1]  # the load as the fewer units had it
        return (
            f"generator {units} saves {max(0.0, saved):.0%} of the generation time, which is less than "
            f"worth ({self._rule.worth:.0%})"
        )

    def _is_in_vain_already(self, units: int, load: _Load) -> bool:
        if self._ceiling is None:
            return False
        most, then = self._ceiling
        return units >= most and not load.is_other(then)

    def _token_times(self) -> list[float]:
        """Return the seconds a token of the newest iterations; empty if they are not known."""
        found = [one.token_s for one in self._seen]
        return [] if None in found else [one for one in found if one]

    def _margin(self, load: _Load) -> float:
        """Return the margin for shrinking: it grows with each change back under the same load."""
        again = 0 if load.is_other(self._reversed_at) else self._reversals
        return 1 - (1 - self._rule.margin) / 2**again

    def _note(self, direction: int, load: _Load) -> None:
        if self._last is not None:
            before, then = self._last
            if direction * before < 0 and not load.is_other(then):
                self._reversals = 1 + (0 if load.is_other(self._reversed_at) else self._reversals)
                self._reversed_at = load
        self._last = direction, load


def _ratio(one: float, other: float) -> float:
    """Return how many times the smaller of two numbers the larger one is."""
    low, high = sorted((one, other))
    return high / low if low > 0 else (math.inf if high > 0 else 1.0)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, as a share of it."""
    return stdev(values) / fmean(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
