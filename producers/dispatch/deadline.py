"""Our dispatch policy: run towards a deadline, which is chosen to make the expected makespan short.

    beliefs ──► draws of all lengths ──► makespan of every (deadline, quantile) ──► the best one rules `pick`

No deadline (longest first) is one of the choices: long samples get an emptier generator only where that is
expected to help. Mixed order is another one: where predictions say little, a long sample that was taken for a
short one should not begin last. While samples finish, more is known, and the choice is made again from the
present state.

A choice takes time, which is measured: one that would take too long is not made, and the present plan stays.
Compiling is no part of that time: it is done in a thread, before the first choice.

A choice is made beside the dispatcher (`choosers.py`), from a copy of the board or of a part of it
(`state.py`). Meanwhile jobs are dealt by the plan in force. Only a fleet with many free slots waits for the
next plan, since that decides about nearly all that there is: some of the longest jobs begin at once, and the
others when the plan is there, or after a second.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from producers.dispatch.board import NO_DEADLINE, Board, BoardGenerator
from producers.dispatch.choosers import AtOnce, Chooser
from producers.dispatch.drift import Drift
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.moves import find_moves
from producers.dispatch.state import (
    LONGEST_FIRST,
    MIXED,
    ChosenJobs,
    SampleTable,
    Setting,
    chosen_jobs,
    compiled,
    table_of,
)
from producers.dispatch.towards import TowardsDeadline
from schemas.identity import SampleKey

TRIED_QUANTILES = (0.5, 0.9, 0.95, 0.98, 0.999)
DRAWS = 40  # of all lengths, to compare settings by
SPAN = np.linspace(0.78, 1.06, 9)  # deadlines to try, in units of the makespan of longest-first
_USUAL_COST_S, _USUAL_WORK = 0.5, 60_000.0  # of a choice about 1,024 samples on 8 generators
_LONGEST_CHOICE_S = 2.0
_LONGEST_HOLD_S = 1.0  # so long do free slots wait for a choice
_MUCH_FREE = 0.25  # share of the slots: if so many are free, most of what waits is dealt by the next plan
_AT_ONCE = 8  # during a choice, one of so many generators gets one of the longest jobs
_LEAST_COST_S = 0.05
_FADES = (
    0.9  # factor by which a choice's expected cost falls whenever it is too high to choose, for it may ...
)
_FADED = 1 / 3  # ... have fallen; but to no less than this share
SPAN_AGAIN = np.linspace(0.9, 1.1, 6)  # the same in later choices, in units of the time to the deadline
_PARTS = (-0.5, -0.25, 0.0, 0.25, 0.5)  # of the distance between those deadlines: tried around the best ones
_PARTS_EXACT = tuple(np.linspace(-0.5, 0.5, 41))
_CLOSE = 0.99
# Looks during one makespan whether samples come out as believed. A look takes .4 ms or more, so small fleets
# take fewer: one for so many samples.
_LOOKS, _FEWEST_LOOKS, _SAMPLES_A_LOOK = 64, 16, 16
# A plan that trusts the ranker holds many samples back, which costs much if the ranker errs as never before.
# So a first plan is also judged by a few draws in which a tenth of the predictions says nothing.
_DOUBT, _DOUBTFUL, _IF_WRONG = 0.04, 4, Drift(wild=0.1)  # their weight and number
_PROBES = 64  # shorter jobs that begin at once beside the long ones: they soon tell whether the ranker errs
_LEAST_GAIN = 0.01  # a plan that gains a smaller share may owe that to chance, as it is the best of many
_LEAST_NEWS = 0.003  # the same where all lengths are known, or the plan in force knew nothing of a drift


@dataclass(frozen=True)
class DeadlineRule:
    """A plan: the rule's settings, and the end that is expected of them."""

    quantile: float
    deadline: float  # on the clock of `now`
    ends: float  # expected end, on the same clock


MovesWhere = Literal["exact", "always", "never"]
NamedMoves = list[tuple[SampleKey, str]]  # running jobs, and the generators that shall continue them


@dataclass(frozen=True)
class _Pending:
    """A choice that is being made."""

    came: bool  # whether it is about jobs that came
    began_at: float
    work: float
    drift: Drift
    held: bool = False  # whether slots wait for it


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
        self._each_s = deque([_USUAL_COST_S / _USUAL_WORK] * 3, maxlen=3)
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


def _looks_for(jobs: int) -> int:
    return min(_LOOKS, max(_FEWEST_LOOKS, jobs // _SAMPLES_A_LOOK))


class DeadlinePolicy:
    """`replans`: how often, during one makespan, the choice is made again by time; 0: never.

    `moves`: where running samples may move: see `DeadlineSettings`.
    `prefill_s`: seconds to prefill a token of a sample that moves; None: as the latency curves say.
    `thrift`: the share of its jobs' expected time that a choice may take; a longer choice is not made.
    `warm`: called before a choice; as long as it returns False, no choice is made.
    `chooser`: where choices are made; None: at once.
    """

    def __init__(
        self,
        group_beliefs: GroupBeliefs,
        *,
        seed: int = 0,
        replans: int = 0,
        thrift: float = float("inf"),
        moves: MovesWhere = "never",
        prefill_s: float | None = None,
        warm: Callable[[], bool] = lambda: True,
        chooser: Chooser[tuple[DeadlineRule, NamedMoves]] | None = None,
    ) -> None:
        self.group_beliefs, self._replans, self._thrift, self.warm = group_beliefs, replans, thrift, warm
        self.costs = Costs()
        self._is_cold = False  # a choice waits until the code is compiled
        self.why = Why.NOTHING  # the reason for the plan in force
        self._moves_where, self._prefill_s = moves, prefill_s
        self.chooser: Chooser[tuple[DeadlineRule, NamedMoves]] = chooser or AtOnce()
        self._pending: _Pending | None = None
        self._held_until = float("-inf")  # until then free slots wait for a choice
        self.moves: NamedMoves = []
        self._drift_of_plan = Drift()  # that the plan in force was chosen by
        self._rng = np.random.default_rng(seed)
        self._mixing = random.Random(seed)
        self.plan: DeadlineRule | None = None
        self._choose_at = float("inf")  # when to choose again, if nothing happens before
        self._span_s = 0.0  # from the newest admission to the end that was expected then
        self._towards = TowardsDeadline()
        self._look_at = float("inf")  # when to look whether the beliefs drift
        self._looks = _LOOKS  # in the time of the newest admission's jobs
        self._moving: list[SampleKey] = []
        self._came = False  # whether jobs came since then
        self._probes = 0  # that are to be begun
        self._regrouped_at: float | None = None  # when generators came or went since then
        self._chosen_at = float("-inf")

    def admitted(self, board: Board, jobs: Sequence[SampleJob], now: float) -> None:
        self._came = True

    def regrouped(self, board: Board, now: float) -> None:
        self._regrouped_at = now
        self._towards.regrouped(board)

    @property
    def wakes_at(self) -> float:
        """When the policy has to be asked again at the latest."""
        if self._pending is None:
            return min(self._choose_at, self._look_at)
        return min(self.chooser.wakes_at, self._held_until if self._pending.held else float("inf"))

    @property
    def usual_choice_s(self) -> float:
        """The seconds that the choice in hand usually takes."""
        return 0.0 if self._pending is None else self._pending.work * _USUAL_COST_S / _USUAL_WORK

    @property
    def by_deadline(self) -> bool:
        """Whether a deadline is in force; otherwise it is longest first."""
        return self.plan is not None and self.plan.deadline < NO_DEADLINE

    @property
    def _is_mixed(self) -> bool:
        return self.plan is not None and (self.plan.quantile, self.plan.deadline) == MIXED

    def counters(self) -> Mapping[str, float]:
        return {
            "by_deadline": float(self.by_deadline), "why_policy": float(self.why),
            "choices": self.costs.count, "choice_s": self.costs.last_s,
        }  # fmt: skip

    def words(self) -> tuple[str, str]:
        if self.by_deadline:
            return "towards a deadline", self.why.words
        return "in mixed order" if self._is_mixed else "the longest first", self.why.words

    def finished(
        self, board: Board, generator: BoardGenerator, job: SampleJob, length: int, now: float
    ) -> None:
        if self.plan is not None and self.by_deadline:
            self._towards.finished(board, generator, job.key, self.group_beliefs, self.plan.quantile)

    def corrected(self, board: Board, keys: Sequence[SampleKey]) -> None:
        if self.plan is not None and self.by_deadline:
            self._towards.corrected(board, keys, self.group_beliefs, self.plan.quantile)

    def tick(self, board: Board, now: float) -> bool:
        """Choose again if it is time. Return whether all generators are to be asked again."""
        adopted = self._pending is not None and self._adopt(board, now)
        if self._pending is not None:
            return self._stop_holding(now)
        if self.plan is not None and self.by_deadline:
            self._towards.catch_up(board, self.group_beliefs, self.plan.quantile)
        came = self._came and not self.chooser.rests(now)
        if self._is_cold and self.warm():
            self._is_cold, came = False, True
        if not (came or self._must_regroup(now) or now >= self._choose_at or self._drifts(board, now)):
            return adopted
        again = not came and self._regrouped_at is None
        self._came, self._regrouped_at, self._chosen_at = False, None, now
        self._choose(board, now, came=came, again=again)
        return True

    def _drifts(self, board: Board, now: float) -> bool:
        """Whether samples come out so differently that the choice should be made again."""
        if now < self._look_at:
            return False
        self._look_at = now + self._span_s / self._looks
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

    def take_moves(self) -> NamedMoves:
        moves, self.moves = self.moves, []
        self._moving = [key for key, _ in moves]
        return moves

    def moved(self, board: Board) -> None:
        if self.plan is not None and self.by_deadline:
            self._towards.moved(board, self._moving)
            self._towards.catch_up(board, self.group_beliefs, self.plan.quantile)

    def fill(
        self, board: Board, asked: Sequence[BoardGenerator], now: float
    ) -> Iterator[tuple[BoardGenerator, SampleKey]]:
        if self._pending is not None and self._pending.held:
            yield from self._at_once(board)
        elif self.plan is None or not self.by_deadline:
            while (key := self._next(board)) and (generator := board.emptiest()):
                yield generator, key
        else:
            rule = self.plan.quantile, self.plan.deadline
            yield from self._towards.fill(board, asked, now, self.group_beliefs, rule)
            if self._probes:
                probes, self._probes = self._probes, 0
                yield from self._towards.probe(board, probes, self.group_beliefs, rule[0])

    def _next(self, board: Board) -> SampleKey | None:
        """Return the job that is next without a deadline; None if no job waits."""
        if self._is_mixed and board.waiting:
            return board.waiting.by_turn()[0].at(self._mixing.random())[1]
        return board.waiting.longest()

    def _at_once(self, board: Board) -> Iterator[tuple[BoardGenerator, SampleKey]]:
        """Yield the longest jobs for some of the generators, one for each: every plan begins with these."""
        for generator in board.fastest_first[: len(board.generators) // _AT_ONCE or 1]:
            longest = board.waiting.longest()
            if longest is not None and not generator.running and generator.free > 0:
                yield generator, longest
        if not board.home and (longest := board.waiting.longest()) and (one := board.emptiest()):
            yield one, longest

    def _stop_holding(self, now: float) -> bool:
        if self._pending is None or not self._pending.held or now < self._held_until:
            return False
        self._pending = replace(self._pending, held=False)
        return True

    def _choose(self, board: Board, now: float, *, came: bool, again: bool) -> None:
        self._choose_at = float("inf")
        if not board.generators or not (board.waiting or board.home):
            self._chose(board, now, came)
            return
        chosen = chosen_jobs(board, now)
        worth_s = self._worth_s(board, chosen)
        why = self._why_not(board, chosen.work, worth_s)
        if not why or (self.by_deadline and why is not Why.ALONE):  # so the code for it is compiled
            keys = None if chosen.are_all else [job.key for job, _, _ in chosen.jobs]
            self.group_beliefs.look(board, keys)
        if why:
            self._stay(board, now, why)
            self._towards.waiting_anew()
            self._chose(board, now, came)
            return
        state = table_of(chosen, self.group_beliefs)
        if self._prefill_s is not None:
            state.prefill_s[:] = self._prefill_s
        # where a row stands for several samples, it says nothing of a single one
        moves = chosen.each == 1 and self._may_move(board)
        self._pending = _Pending(came, now, chosen.work, state.drift)
        self.chooser.begin(lambda: self._best(state, now, again=again, moves=moves), now)
        if not self._adopt(board, now) and came and self._is_idle(board):
            self._pending = replace(self._pending, held=True)
            self._held_until = now + min(worth_s, _LONGEST_HOLD_S)

    def _may_move(self, board: Board) -> bool:
        if self._moves_where == "exact":
            return all(generator.keeps_bits for generator in board.generators.values())
        return self._moves_where == "always"

    @staticmethod
    def _is_idle(board: Board) -> bool:
        free = sum(max(0, one.free) for one in board.generators.values())
        return free >= _MUCH_FREE * sum(one.slots for one in board.generators.values())

    def _adopt(self, board: Board, now: float) -> bool:
        """Put the plan in force that was chosen. Return False if it is not there yet."""
        pending, found = self._pending, self.chooser.take(now)
        if found is None or pending is None:
            return False
        (plan, self.moves), seconds = found
        self._pending = None
        self.costs.add(seconds, pending.work)
        if pending.held and plan.deadline < NO_DEADLINE:  # nearly all begins only now
            late = now - pending.began_at
            plan = replace(plan, deadline=plan.deadline + late, ends=plan.ends + late)
        self.plan, self.why, self._drift_of_plan = plan, Why.CHOSEN, pending.drift
        if self.by_deadline:
            self._towards.all_anew(board)  # by the new quantile
            self._towards.catch_up(board, self.group_beliefs, plan.quantile)
        else:
            self._towards.stop(board)
        if pending.came and not self.group_beliefs.beliefs.exact:
            self._probes = _PROBES
        self._chose(board, now, pending.came)
        return True

    def _chose(self, board: Board, now: float, came: bool) -> None:
        """Note when to look whether beliefs drift, and when to choose again."""
        plan = self.plan
        if self._replans and plan is not None and plan.ends > now:
            # of the time that is left, but not ever more often towards the end
            self._choose_at = now + max(plan.ends - now, self._span_s / 2) / self._replans
        if came and plan is not None:
            self._span_s, self._looks = plan.ends - now, _looks_for(len(board.waiting) + len(board.home))
        looks = self._replans and self.why is Why.CHOSEN and self._span_s > 0
        self._look_at = now + self._span_s / self._looks if looks else float("inf")

    def _stay(self, board: Board, now: float, why: Why) -> None:
        """Keep a deadline that is in force: it is worth no less than before. Otherwise set longest first."""
        if not self.by_deadline or why is Why.ALONE:
            self.plan, self.why, self._drift_of_plan = DeadlineRule(0.5, NO_DEADLINE, now), why, Drift()
            self._towards.stop(board)

    def _why_not(self, board: Board, work: float, worth_s: float) -> Why:
        """Return the reason why no choice is made now; Why.NOTHING if one is made."""
        if len(board.generators) == 1:
            return Why.ALONE
        if not self.group_beliefs.beliefs.are_known:
            return Why.UNKNOWN
        if self._thrift < float("inf") and self.costs.of(work) > min(worth_s, _LONGEST_CHOICE_S):
            self.costs.fade()
            return Why.DEAR
        if not self.warm():
            self._is_cold = True
            return Why.COLD
        return Why.NOTHING

    def _worth_s(self, board: Board, chosen: ChosenJobs) -> float:
        """Return how many seconds a choice may take."""
        tokens = [job.prompt.predicted for job, _, _ in chosen.jobs]
        speed = sum(i.slots / float(i.seconds[-1]) for i in board.generators.values())
        alone = max(tokens) * min(float(i.seconds[1]) for i in board.generators.values())
        return max(sum(tokens) * chosen.scale / speed, alone) * self._thrift

    def _best(
        self, state: SampleTable, now: float, *, again: bool, moves: bool
    ) -> tuple[DeadlineRule, NamedMoves]:
        """Find the best plan: compare all settings by few draws, the better ones by more, the best by all.

        Later, with a deadline in force, only settings near it are tried, by half the draws, since that
        happens often. Return the moves with it.
        """
        stay, exact = self._in_force(now), state.learned.exact
        near_it = again and 0 < stay[1] < NO_DEADLINE
        draws = self._draws(state, 1 if exact else DRAWS // 2 if again else DRAWS, state.drift)
        few = draws[: len(draws) // 8 or 1]
        doubts = self._draws(state, 0 if again or exact else _DOUBTFUL, _IF_WRONG)
        judge = partial(self._judge, state, doubts)
        unit = stay[1] if near_it else state.expected(few, LONGEST_FIRST)
        span = SPAN_AGAIN if near_it else SPAN
        width = (span[1] - span[0]) * unit
        grid = [(z, unit * share) for z in ((0.5,) if exact else TRIED_QUANTILES) for share in span]
        tried = self._sift(few, judge, grid)[: 3 if again else 4]
        none_yet = again and stay[1] >= NO_DEADLINE
        if none_yet and judge(few, tried[0]) > unit * _CLOSE:
            tried = []  # still nothing promises more than longest first
        parts = _PARTS_EXACT if exact else _PARTS[1:-1] if again else _PARTS
        near = {(z, deadline + part * width) for z, deadline in tried for part in parts}
        tried = self._sift(draws[: len(draws) // 2 or 1], judge, sorted(near))[: 3 if again else 4]
        tried += [LONGEST_FIRST] if exact or not (state.where == -1).any() else [LONGEST_FIRST, MIXED]
        settings = {setting: judge(draws, setting) for setting in tried}
        best = min(settings, key=lambda setting: settings[setting])
        if stay not in settings:
            settings[stay] = judge(draws, stay)
        is_news = exact or state.drift != self._drift_of_plan
        if settings[best] > settings[stay] * (1 - (_LEAST_NEWS if is_news else _LEAST_GAIN)):
            best = stay
        ends = state.expected(draws, best)
        named: NamedMoves = []
        if moves and not exact:
            found, best, ends = find_moves(state, draws[: len(draws) // 2 or 1], best)
            named = [(state.keys[row], state.names[target]) for row, target in found]
        deadline = best[1] if best[1] >= NO_DEADLINE else now + best[1]
        return DeadlineRule(best[0], deadline, now + ends), named

    def _in_force(self, now: float) -> Setting:
        """Return the present settings, with the deadline counted from now."""
        if self.plan is None:
            return LONGEST_FIRST
        deadline = self.plan.deadline
        return self.plan.quantile, deadline if deadline >= NO_DEADLINE else deadline - now

    @staticmethod
    def _judge(state: SampleTable, doubts: np.ndarray, draws: np.ndarray, setting: Setting) -> float:
        """Return the expected makespan, with some weight on draws in which the ranker is wrong."""
        ends = state.expected(draws, setting)
        return (1 - _DOUBT) * ends + _DOUBT * state.expected(doubts, setting) if len(doubts) else ends

    @staticmethod
    def _sift(
        draws: np.ndarray, judge: Callable[[np.ndarray, Setting], float], settings: Sequence[Setting]
    ) -> list[Setting]:
        """Return the settings, best first."""
        return [setting for _, setting in sorted((judge(draws, s), s) for s in settings)]

    def _draws(self, state: SampleTable, count: int, drift: Drift) -> np.ndarray:
        """Draw lengths, each greater than the number of tokens that its sample has already."""
        draws = state.learned.draws(state.predicted, count, self._rng, state.kin, drift)
        draw, row = np.nonzero(draws <= state.tokens[None, :])
        mean, spread = np.zeros(len(row)), np.ones(len(row))
        if state.kin is not None:
            mean, spread = state.kin.mean[row], np.hypot(state.kin.common, state.kin.own)[row]
        tokens = state.tokens[row]
        longer = state.learned.outlasting(state.predicted[row], tokens, self._rng, (mean, spread), drift)
        outlived = compiled().OUTLIVED * tokens + 20.0
        draws[draw, row] = np.where(longer > tokens, longer, outlived)
        return draws
