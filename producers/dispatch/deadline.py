"""Our dispatch policy: run towards a deadline, which is chosen to make the expected makespan short.

    beliefs ──► draws of all lengths ──► makespan of every (deadline, quantile) ──► the best one rules `pick`

No deadline (longest first) is one of the choices: long samples get an emptier generator only where that is
expected to help. While samples finish, more is known, and the choice is made again from the present state.

A choice takes time, which is measured: one that would take too long is not made, and the present plan stays.
Compiling is no part of that time: it is done in a thread, before the first choice.
"""

from __future__ import annotations

import enum
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from producers.dispatch.board import NO_DEADLINE, Board, BoardGenerator
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.moves import find_moves
from producers.dispatch.state import LONGEST_FIRST, SampleTable, Setting, compiled, state_of
from schemas.identity import SampleKey

TRIED_QUANTILES = (0.5, 0.9, 0.95, 0.98, 0.999)
DRAWS = 40  # of all lengths, to compare settings by
SPAN = np.linspace(0.78, 1.06, 9)  # deadlines to try, in units of the makespan of longest-first
_USUAL_COST_S = 0.5  # seconds of a choice about 1,024 samples on 8 generators
_LONGEST_CHOICE_S = 2.0  # during a choice no generator is given anything
_LEAST_COST_S = 0.05
_HEAP = 50  # in a plan's run, a sample costs as much as a look at so many generators
_FADES = (
    0.9  # factor by which a choice's expected cost falls whenever it is too high to choose, for it may ...
)
_FADED = 1 / 3  # ... have fallen; but to no less than this share
SPAN_AGAIN = np.linspace(0.9, 1.1, 6)  # the same in later choices, in units of the time to the deadline
_PARTS = (-0.5, -0.25, 0.0, 0.25, 0.5)  # of the distance between those deadlines: tried around the best ones
_PARTS_EXACT = tuple(np.linspace(-0.5, 0.5, 41))
_CLOSE = 0.99
_LOOKS = 64  # looks during one makespan whether samples come out as believed
_LEAST_GAIN = 0.003  # a deadline that gains a smaller share is not worth changing to


@dataclass(frozen=True)
class DeadlineRule:
    """A plan: the rule's settings, and the end that is expected of them."""

    quantile: float
    deadline: float  # on the clock of `now`
    ends: float  # expected end, on the same clock


def _next_step(generator: BoardGenerator) -> tuple[float, str]:
    """Return the seconds of the generator's step with one more job, and its name, which breaks ties."""
    return float(generator.seconds[min(len(generator.running) + 1, generator.slots)]), generator.name


class Why(enum.IntEnum):
    """The reason for the plan in force: for longest first, why there is no deadline."""

    NOTHING = 0  # there was nothing to choose yet
    ALONE = 1  # there is only one generator
    DEAR = 2  # choosing would take too long
    COLD = 3  # the code that chooses is being compiled
    CHOSEN = 4  # the plan is expected to end soonest
    UNKNOWN = 5  # too few lengths are known to believe anything

    @property
    def words(self) -> str:
        """The reason in words, for the log."""
        return {
            Why.NOTHING: "there was nothing to choose yet", Why.ALONE: "there is only one generator",
            Why.DEAR: "to choose a plan would take longer than is worth it",
            Why.COLD: "the code that chooses a plan is still being compiled",
            Why.CHOSEN: "this plan is expected to end soonest",
            Why.UNKNOWN: "too few lengths are known yet",
        }[self]  # fmt: skip


class Costs:
    """Estimates how long choices take: by the median of the last three, in case the machine was busy once."""

    def __init__(self) -> None:
        self._each_s = deque([_USUAL_COST_S / (1024 * (_HEAP + 8))] * 3, maxlen=3)
        self._faded = 1.0
        self.last_s = 0.0
        self.count = 0

    def of(self, work: float) -> float:
        """Return the expected seconds of a choice with so much work."""
        return work * sorted(self._each_s)[1] * self._faded

    def add(self, seconds: float, work: float) -> None:
        """Note how long a choice took."""
        self._each_s.append(seconds / work)
        self._faded, self.last_s = 1.0, seconds
        self.count += 1

    def fade(self) -> None:
        """Lower the estimate, to no less than a third: a choice was not made because of its cost."""
        self._faded = max(_FADED, self._faded * _FADES)


_TurnJobs = tuple[np.ndarray, list[SampleKey]]  # declared lengths, ascending, and the keys of their jobs


class DeadlinePolicy:
    """`replans`: how often, during one makespan, the choice is made again by time; 0: never.

    `move_s`: seconds to move a running sample, for each token that it has; None: samples are not moved.
    `thrift`: the share of its jobs' expected time that a choice may take; a longer choice is not made.
    `warm`: called before a choice; as long as it returns False, no choice is made.
    """

    def __init__(
        self,
        group_beliefs: GroupBeliefs,
        *,
        seed: int = 0,
        replans: int = 0,
        thrift: float = float("inf"),
        move_s: float | None = None,
        warm: Callable[[], bool] = lambda: True,
    ) -> None:
        self.group_beliefs, self._replans, self._thrift, self.warm = group_beliefs, replans, thrift, warm
        self.costs = Costs()
        self._is_cold = False  # a choice waits until the code is compiled
        self.why = Why.NOTHING  # the reason for the plan in force
        self._move_s = move_s
        self.moves: list[
            tuple[SampleKey, str]
        ] = []  # running jobs, and the generators that shall continue them
        self._rng = np.random.default_rng(seed)
        self.plan: DeadlineRule | None = None
        self._choose_at = float("inf")  # when to choose again, if nothing happens before
        self._span_s = 0.0  # from the newest admission to the end that was expected then
        self._said: dict[
            SampleKey, float
        ] = {}  # by running job: its generator's step at which it is expected to end
        self._last: dict[str, float] = {}  # by generator: the largest of these
        self._kept: list[_TurnJobs] | None = None
        self._told: dict[SampleKey, float] = {}  # declared lengths of waiting jobs
        self._all_alive = np.ones(0, np.bool_)
        self._look_at = float("inf")  # when to look whether the beliefs drift
        self._came = False  # whether jobs came since then
        self._regrouped_at: float | None = None  # when generators came or went since then
        self._chosen_at = float("-inf")

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None:
        self._came = True

    def regrouped(self, board: Board, now: float) -> None:
        self._regrouped_at = now
        self._last = {name: last for name, last in self._last.items() if name in board.generators}

    @property
    def wakes_at(self) -> float:
        """When the policy has to be asked again at the latest."""
        return min(self._choose_at, self._look_at)

    @property
    def by_deadline(self) -> bool:
        """Whether a deadline is in force; otherwise it is longest first."""
        return self.plan is not None and self.plan.deadline < NO_DEADLINE

    def counters(self) -> Mapping[str, float]:
        return {
            "by_deadline": float(self.by_deadline), "why_policy": float(self.why),
            "choices": self.costs.count, "choice_s": self.costs.last_s,
        }  # fmt: skip

    def words(self) -> tuple[str, str]:
        return "towards a deadline" if self.by_deadline else "the longest first", self.why.words

    def finished(
        self, board: Board, generator: BoardGenerator, job: SampleJob, length: int, now: float
    ) -> None:
        self._told.pop(job.key, None)
        if not self.by_deadline:
            return
        last = self._last.get(generator.name, 0.0)
        if self._said.pop(job.key, 0.0) >= last - 1e-6 or last <= generator.steps:
            self._look_again(generator)

    def corrected(self, board: Board, keys: Sequence[SampleKey]) -> None:
        if not self.by_deadline:
            return
        self._kept = None
        for key in keys:
            self._told.pop(key, None)
            self._said.pop(key, None)
        for generator in board.generators.values():
            if any(key in generator.running for key in keys):
                self._look_again(generator)

    def tick(self, board: Board, now: float) -> bool:
        """Choose again if it is time. Return whether that was done."""
        came = self._came
        if self._is_cold and self.warm():
            self._is_cold, came = False, True
        if not (came or self._must_regroup(now) or now >= self._choose_at or self._drifts(board, now)):
            return False
        again = not came and self._regrouped_at is None
        self._came, self._regrouped_at, self._chosen_at = False, None, now
        self._choose_at = float("inf")
        self._choose(board, now, again=again)
        if came and self.plan is not None:
            self._span_s = self.plan.ends - now
        looks = self._replans and self.why is Why.CHOSEN and self._span_s > 0
        self._look_at = now + self._span_s / _LOOKS if looks else float("inf")
        return True

    def _drifts(self, board: Board, now: float) -> bool:
        """Whether samples come out so differently that the choice should be made again."""
        if now < self._look_at:
            return False
        self._look_at = now + self._span_s / _LOOKS
        return self.group_beliefs.drift_seen(board).differs(self.group_beliefs.drift)

    def _must_regroup(self, now: float) -> bool:
        """Whether to choose again because generators came or went.

        That is not done too often: when a hundred generators join one after the other, the present plan rules
        the new ones for a while.
        """
        if self._regrouped_at is None:
            return False
        return (
            self.plan is None or now >= self._chosen_at + max(self.costs.last_s, _LEAST_COST_S) / self._thrift
        )

    def take_moves(self) -> list[tuple[SampleKey, str]]:
        moves, self.moves = self.moves, []
        for key, _ in moves:
            self._said.pop(key, None)
        return moves

    def moved(self, board: Board) -> None:
        if self.by_deadline:
            for generator in board.generators.values():
                self._look_again(generator)

    def fill(
        self, board: Board, asked: Sequence[BoardGenerator], now: float
    ) -> Iterator[tuple[BoardGenerator, SampleKey]]:
        if not self.by_deadline:
            yield from self._longest_first(board)
            return
        while board.waiting and (chosen := self._pick(board, asked, now)) is not None:
            yield chosen

    def _longest_first(self, board: Board) -> Iterator[tuple[BoardGenerator, SampleKey]]:
        """Yield the longest jobs, each with the generator whose next step would be the fastest."""
        heap = [(_next_step(one), one) for one in board.generators.values() if one.free > 0]
        heapq.heapify(heap)  # names differ, so generators are never compared
        while heap and (longest := board.waiting.longest()) is not None:
            generator = heap[0][1]
            yield generator, longest
            if generator.free > 0:
                heapq.heapreplace(heap, (_next_step(generator), generator))
            else:
                heapq.heappop(heap)

    def _pick(
        self, board: Board, asked: Sequence[BoardGenerator], now: float
    ) -> tuple[BoardGenerator, SampleKey] | None:
        """Pick the next job to start, by the same rule as `makespan`.

        If the longest job can't wait any longer, it starts at once where it runs fastest; else `pick`
        decides.
        """
        generators, plan = board.fastest_first, self.plan
        assert plan is not None
        fastest = min((i for i in generators if i.free > 0), key=_next_step, default=None)
        turns = self._turns(board)
        if fastest is None or not turns:
            return None
        keys = turns[0][0]
        idle = not any(i.running for i in generators)
        soon = now + keys[-1] * _next_step(fastest)[0]
        if soon >= plan.deadline or idle:
            return self._start(fastest, turns[0], len(keys) - 1)
        limit = max(plan.deadline, *(now + self._longest(i) * float(i.seconds[1]) for i in generators))
        for generator in asked:
            if generator.free <= 0:
                continue
            batch = min(len(generator.running), generator.slots - 1)
            for turn in turns:
                keys = turn[0]
                place = compiled().pick(
                    keys, self._all_alive[: len(keys)], len(keys) - 1, batch, self._longest(generator),
                    generator.seconds, limit - now,
                )  # fmt: skip
                if place >= 0:
                    return self._start(generator, turn, place)
        return None

    def _turns(self, board: Board) -> list[_TurnJobs]:
        """Return the waiting jobs with declared lengths, by turn.

        Cached until the next choice or correction.
        """
        if self._kept is None or sum(len(names) for _, names in self._kept) != len(board.waiting):
            assert self.plan is not None
            quantile = self.plan.quantile
            self._kept = []
            for turn in board.waiting.by_turn():
                names = [key for _, key in turn]
                for key in names:
                    if key not in self._told:
                        self._told[key] = compiled().declared(self.group_beliefs.row[key], 0.0, quantile)
                keys = [self._told[key] for key in names]
                self._kept.append((np.maximum.accumulate(keys), names))
            most = max((len(names) for _, names in self._kept), default=0)
            self._all_alive = np.ones(most, np.bool_)
        return self._kept

    def _start(
        self, generator: BoardGenerator, turn: _TurnJobs, place: int
    ) -> tuple[BoardGenerator, SampleKey]:
        keys, names = turn
        key = names.pop(place)
        said = self._said[key] = generator.steps + float(keys[place])
        self._last[generator.name] = max(self._last.get(generator.name, 0.0), said)
        assert self._kept is not None
        number = next(number for number, one in enumerate(self._kept) if one[1] is names)
        if names:
            self._kept[number] = np.delete(keys, place), names
        else:
            del self._kept[number]
        return generator, key

    def _longest(self, generator: BoardGenerator) -> float:
        """Return how many more tokens the generator's longest job is expected to need."""
        return max(0.0, self._last.get(generator.name, 0.0) - generator.steps) if generator.running else 0.0

    def _look_again(self, generator: BoardGenerator) -> None:
        """Find the generator's longest job again. Jobs that are longer than declared are declared anew."""
        assert self.plan is not None
        self._last[generator.name] = generator.steps
        for key in generator.running:
            if self._said.get(key, 0.0) <= generator.steps:
                tokens = generator.tokens(key)
                left = compiled().declared(self.group_beliefs.row[key], tokens, self.plan.quantile) - tokens
                self._said[key] = generator.steps + left
            self._last[generator.name] = max(self._last[generator.name], self._said[key])

    def _choose(self, board: Board, now: float, *, again: bool = False) -> None:
        count = len(board.waiting) + sum(len(one.running) for one in board.generators.values())
        if not board.generators or not count:
            self._choose_at = float("inf")
            return
        began = time.monotonic()
        self._kept = None
        self._told.clear()
        if len(board.generators) > 1:  # the only generator gets the longest first anyway
            self.group_beliefs.look(board)
        work = count * (_HEAP + len(board.generators))
        if why := self._why_not(board, work):
            self._stay(board, now, why)
        else:
            self._choose_now(board, now, again)
            self.costs.add(time.monotonic() - began, work)
        plan = self.plan
        if self._replans and plan is not None and plan.ends > now:
            # of the time that is left, but not ever more often towards the end
            step = max(plan.ends - now, self._span_s / 2) / self._replans
            self._choose_at = now + step

    def _choose_now(self, board: Board, now: float, again: bool) -> None:
        self._said.clear()  # running jobs are declared anew, by the new quantile
        self.plan, self.why = self._best(state_of(board, self.group_beliefs, now), now, again), Why.CHOSEN
        for generator in board.generators.values():
            self._look_again(generator)

    def _stay(self, board: Board, now: float, why: Why) -> None:
        """Keep a deadline that is in force: it is worth no less than before. Otherwise set longest first."""
        if not self.by_deadline or why is Why.ALONE:
            self.plan, self.why = DeadlineRule(0.5, NO_DEADLINE, now), why
        running = [key for one in board.generators.values() for key in one.running]
        self._said = {key: self._said[key] for key in running if key in self._said}

    def _why_not(self, board: Board, work: float) -> Why:
        """Return the reason why no choice is made now; Why.NOTHING if one is made."""
        if len(board.generators) == 1:
            return Why.ALONE
        if not self.group_beliefs.beliefs.are_known:
            return Why.UNKNOWN
        if self._thrift < float("inf") and self.costs.of(work) > min(self._worth_s(board), _LONGEST_CHOICE_S):
            self.costs.fade()
            return Why.DEAR
        if not self.warm():
            self._is_cold = True
            return Why.COLD
        return Why.NOTHING

    def _worth_s(self, board: Board) -> float:
        """Return how many seconds a choice may take."""
        tokens = [predicted for _, predicted in board.waiting]
        tokens += [job.prompt.predicted for i in board.generators.values() for job in i.running.values()]
        speed = sum(i.slots / float(i.seconds[-1]) for i in board.generators.values())
        alone = max(tokens) * min(float(i.seconds[1]) for i in board.generators.values())
        return max(sum(tokens) / speed, alone) * self._thrift

    def _best(self, state: SampleTable, now: float, again: bool) -> DeadlineRule:
        """Find the best plan: compare all settings by few draws, the better ones by more, the best by all.

        Later, with a deadline in force, only settings near it are tried, by half the draws, since that
        happens often.
        """
        stay, exact = self._in_force(now), self.group_beliefs.beliefs.exact
        near_it = again and 0 < stay[1] < NO_DEADLINE
        draws = self._draws(state, 1 if exact else DRAWS // 2 if again else DRAWS)
        few = draws[: len(draws) // 8 or 1]
        unit = stay[1] if near_it else state.expected(few, LONGEST_FIRST)
        span = SPAN_AGAIN if near_it else SPAN
        width = (span[1] - span[0]) * unit
        grid = [(z, unit * share) for z in ((0.5,) if exact else TRIED_QUANTILES) for share in span]
        tried = self._sift(few, state, grid)[: 3 if again else 4]
        none_yet = again and stay[1] >= NO_DEADLINE
        if none_yet and state.expected(few, tried[0]) > unit * _CLOSE:
            tried = []  # still nothing promises more than longest first
        parts = _PARTS_EXACT if exact else _PARTS[1:-1] if again else _PARTS
        near = {(z, deadline + part * width) for z, deadline in tried for part in parts}
        tried = self._sift(draws[: len(draws) // 2 or 1], state, sorted(near))[: 3 if again else 4]
        settings = {setting: state.expected(draws, setting) for setting in [*tried, LONGEST_FIRST]}
        best = min(settings, key=lambda setting: settings[setting])
        if stay not in settings:
            settings[stay] = state.expected(draws, stay)
        if settings[best] > settings[stay] * (1 - _LEAST_GAIN):
            best = stay
        self.moves = []
        if self._move_s is not None and not self.group_beliefs.beliefs.exact:
            moves, best, ends = find_moves(state, draws[: len(draws) // 2 or 1], best, self._move_s)
            settings[best] = ends
            self.moves = [(state.keys[row], state.names[target]) for row, target in moves]
        deadline = best[1] if best[1] >= NO_DEADLINE else now + best[1]
        return DeadlineRule(best[0], deadline, now + settings[best])

    def _in_force(self, now: float) -> Setting:
        """Return the present settings, with the deadline counted from now."""
        if self.plan is None or self.plan.deadline >= NO_DEADLINE:
            return 0.5, NO_DEADLINE
        return self.plan.quantile, self.plan.deadline - now

    def _sift(self, draws: np.ndarray, state: SampleTable, settings: Sequence[Setting]) -> list[Setting]:
        """Return the settings, best first."""
        return [setting for _, setting in sorted((state.expected(draws, s), s) for s in settings)]

    def _draws(self, state: SampleTable, count: int) -> np.ndarray:
        """Draw lengths, each greater than the number of tokens that its sample has already."""
        drift = self.group_beliefs.drift
        draws = self.group_beliefs.beliefs.draws(
            state.predicted, count, self._rng, state.kin, drift.wild, (drift.shift, drift.error)
        )
        for row in np.flatnonzero(state.tokens > 0):
            tokens = state.tokens[row]
            left = state.beliefs[row][state.beliefs[row] > tokens]
            impossible = draws[:, row] <= tokens
            number = int(impossible.sum())
            draws[impossible, row] = (
                self._rng.choice(left, number)
                if len(left)
                else compiled().declared(state.beliefs[row], tokens, 0.5)
            )
        return draws
