"""Deals jobs towards a deadline: each free slot gets the longest waiting job that ends in time, by `reach`.

Jobs' lengths are declared: a quantile of their beliefs. Of each generator the step is known at which the last
of its jobs is declared to end. A job that outlives its declared length is declared anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from producers.dispatch.board import NO_DEADLINE, Board, BoardGenerator
from producers.dispatch.group_beliefs import GroupBeliefs
from producers.dispatch.jobs import SampleJob
from producers.dispatch.length_order import OrderedJob
from producers.dispatch.state import compiled
from schemas.identity import SampleKey

_PROBED = 16  # of so many jobs one may be a probe
_PROBED_PART = 0.1, 0.3  # of the order of length: the very shortest are predicted the worst
_MOST_ANEW = 4096  # running jobs that are declared anew in one turn

Dealt = tuple[BoardGenerator, SampleKey]


class LatestEnd:
    """When the last generator is done at the earliest: if it ran its longest job alone from now on."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._late: set[str] = set()  # generators that are done after the deadline even so
        self.deadline = NO_DEADLINE
        self._columns = np.zeros((2, 0))  # when it is done, as a line over the time: see `note`

    def clear(self) -> None:
        """Drop all generators."""
        self._places.clear()
        self._late.clear()
        self._columns = np.zeros((2, 0))

    def note(self, generator: BoardGenerator, last: float) -> None:
        """Note at which step the last of a generator's jobs ends."""
        place = self._places.get(generator.name)
        if place is None:
            place = self._places[generator.name] = len(self._places)
            if place >= self._columns.shape[1]:
                more = np.full((2, max(16, place)), -np.inf)
                self._columns = np.concatenate([self._columns, more], axis=1)
        # the steps that are left now take alone_s each; each second that passes, some of them are made
        alone_s, paced = generator.seconds.item(1), 1 / generator.step_s
        left = last - generator.steps + generator.now * paced
        base, slope = left * alone_s if generator.running else -math.inf, 1 - paced * alone_s
        self._columns[0, place], self._columns[1, place] = base, slope
        if base + slope * self.deadline > self.deadline:
            self._late.add(generator.name)
        else:
            self._late.discard(generator.name)

    def at(self, now: float) -> float:
        """Return that time, or the deadline if that is later."""
        if now <= self.deadline and not self._late:  # no line falls, so up to the deadline none is above it
            return self.deadline
        base, slope = self._columns[:, : len(self._places)]
        return float((base + slope * now).max(initial=max(now, self.deadline)))


class TowardsDeadline:
    """Knows when running jobs are declared to end, and decides by that what free slots get."""

    def __init__(self) -> None:
        self._quantile: float | None = None  # at which all lengths are declared; None: they are not
        self._said: dict[SampleKey, float] = {}  # by running job: its generator's step at which it should end
        self._last: dict[str, float] = {}  # by generator: the largest of these
        self._latest = LatestEnd()
        self._changed: set[str] = set()  # generators that `_latest` has to hear of
        self._stale: dict[str, None] = {}  # generators whose jobs are to be looked at again

    def stop(self, board: Board) -> None:
        """Forget all: no deadline is in force."""
        self._quantile = None
        board.waiting.declare(None)
        for known in (self._said, self._last, self._changed, self._stale, self._latest):
            known.clear()

    def waiting_anew(self) -> None:
        """Have the lengths of all waiting jobs declared anew before the next one is dealt."""
        self._quantile = None

    def all_anew(self, board: Board) -> None:
        """Have the lengths of all jobs declared anew: those of very many running ones in later turns."""
        self._said.clear()
        self.waiting_anew()
        self.moved(board)

    def moved(self, board: Board, keys: Sequence[SampleKey] = ()) -> None:
        """Look at all generators again. `keys`: jobs that have another generator now."""
        for key in keys:
            self._said.pop(key, None)
        self._stale = dict.fromkeys(board.generators)

    def regrouped(self, board: Board) -> None:
        """Forget generators that are gone, and the jobs that they had."""
        self._last = {name: last for name, last in self._last.items() if name in board.generators}
        self._latest.clear()
        self._changed = set(board.generators)
        if len(self._said) > 2 * len(board.home) + 64:
            self._said = {key: said for key, said in self._said.items() if key in board.home}

    def catch_up(self, board: Board, group_beliefs: GroupBeliefs, quantile: float) -> None:
        """Look at some of the generators that are to be looked at again."""
        left = _MOST_ANEW
        while self._stale and left > 0:
            name = next(iter(self._stale))
            generator = board.generators.get(name)
            if generator is None:
                del self._stale[name]
                continue
            left -= len(generator.running)
            self._look_again(board, generator, group_beliefs, quantile)

    def finished(
        self, board: Board, generator: BoardGenerator, key: SampleKey, group_beliefs: GroupBeliefs,
        quantile: float,
    ) -> None:  # fmt: skip
        """Note that a generator has done a job."""
        last = self._last.get(generator.name, 0.0)
        said = self._said.pop(key, 0.0)
        self._changed.add(generator.name)
        if said >= last - 1e-6 or last <= generator.steps or generator.name in self._stale:
            self._look_again(board, generator, group_beliefs, quantile)

    def corrected(
        self, board: Board, keys: Sequence[SampleKey], group_beliefs: GroupBeliefs, quantile: float
    ) -> None:
        """Declare jobs anew: their beliefs have changed."""
        home = board.home
        known = [key for key in keys if key in home and home[key] not in self._stale]
        if not known:
            return
        has = board.tokens(known)
        lengths = group_beliefs.declared(known, has, quantile)
        for key, tokens, length in zip(known, has, lengths, strict=True):
            name = home[key]
            generator = board.generators[name]
            last, before = self._last.get(name, 0.0), self._said.get(key, 0.0)
            said = self._said[key] = generator.steps + length - tokens
            if said >= last:
                self._last[name] = said
                self._changed.add(name)
            elif before >= last - 1e-6:
                self._look_again(board, generator, group_beliefs, quantile)

    def fill(
        self, board: Board, asked: Sequence[BoardGenerator], now: float, group_beliefs: GroupBeliefs,
        rule: tuple[float, float],
    ) -> Iterator[Dealt]:  # fmt: skip
        """Yield the jobs to start, by the same rule as `makespan`. `rule`: quantile and deadline.

        If the longest job can't wait any longer, it starts at once where it runs fastest; else `reach`
        decides, for each of `asked` once it has taken what it may.
        """
        quantile, deadline = rule
        waiting = board.waiting
        if not waiting:
            return
        self._declare(board, group_beliefs, quantile)
        limit = self._latest_end(board, deadline, now)
        candidates = iter(asked)
        candidate = next(candidates, None)
        while waiting and (fastest := board.emptiest()) is not None:
            longest, most = waiting.by_turn()[0].longest()
            if now + most * fastest.next_step_s >= deadline or not board.home:
                generator, one, length = fastest, longest, most
            else:
                found = None
                while candidate is not None and (found := self._find(board, candidate, limit - now)) is None:
                    candidate = next(candidates, None)
                if candidate is None or found is None:
                    return
                generator, (one, length) = candidate, found
            limit = max(limit, now + self._start(board, generator, one, length))
            yield generator, one[1]

    def probe(
        self, board: Board, count: int, group_beliefs: GroupBeliefs, quantile: float
    ) -> Iterator[Dealt]:
        """Yield at most `count` of the shorter waiting jobs, for generators with free slots in turn."""
        free = [generator for generator in board.fastest_first if generator.free > 0]
        waiting = len(board.waiting)
        for number in range(min(count, waiting // _PROBED) if free else 0):
            generator = free[number % len(free)]
            order = board.waiting.by_turn()[0]
            low, high = _PROBED_PART
            one = order.at(low + (high - low) * number / count)
            if generator.free > 0:
                self._start(board, generator, one, group_beliefs.declared([one[1]], [0.0], quantile)[0])
                yield generator, one[1]

    def _find(
        self, board: Board, generator: BoardGenerator, left_s: float
    ) -> tuple[OrderedJob, float] | None:
        """Return the job that a generator's next free slot gets, and its declared length."""
        if generator.free <= 0:
            return None
        generator.advance(board.now)
        batch = min(len(generator.running), generator.slots - 1)
        longest = max(0.0, self._last.get(generator.name, 0.0) - generator.steps) if batch else 0.0
        for order in board.waiting.by_turn():
            top = order.longest()
            most = compiled().reach(top[1], batch, longest, generator.seconds, left_s)
            if (found := order.within(most)) is not None:
                return found
            if batch == 0:
                return top
        return None

    def _start(self, board: Board, generator: BoardGenerator, one: OrderedJob, length: float) -> float:
        """Note that a job is started. Return the seconds that its generator would need for it alone."""
        generator.advance(board.now)
        said = self._said[one[1]] = generator.steps + length
        last = self._last.get(generator.name, 0.0) if generator.running else 0.0
        self._last[generator.name] = max(last, said)
        self._changed.add(generator.name)
        return (self._last[generator.name] - generator.steps) * float(generator.seconds[1])

    def _declare(self, board: Board, group_beliefs: GroupBeliefs, quantile: float) -> None:
        if self._quantile == quantile:
            return
        self._quantile = quantile

        def tell(jobs: Sequence[SampleJob]) -> Sequence[float]:
            return group_beliefs.declared([job.key for job in jobs], [0.0] * len(jobs), quantile)

        board.waiting.declare(tell)

    def _latest_end(self, board: Board, deadline: float, now: float) -> float:
        if deadline != self._latest.deadline:
            self._latest.deadline = deadline
            self._changed.update(board.generators)
        for name in self._changed:
            if (generator := board.generators.get(name)) is not None:
                self._latest.note(generator, self._last.get(name, 0.0))
        self._changed.clear()
        return self._latest.at(now)

    def _look_again(
        self, board: Board, generator: BoardGenerator, group_beliefs: GroupBeliefs, quantile: float
    ) -> None:
        """Find the generator's longest job again. Jobs that are longer than declared are declared anew."""
        generator.advance(board.now)
        self._stale.pop(generator.name, None)
        self._changed.add(generator.name)
        steps = generator.steps
        outlived = [key for key in generator.running if self._said.get(key, 0.0) <= steps]
        if outlived:
            tokens = generator.tokens_of(outlived)
            lengths = group_beliefs.declared(outlived, tokens, quantile)
            for key, length, has in zip(outlived, lengths, tokens, strict=True):
                self._said[key] = steps + length - has
        self._last[generator.name] = max([steps, *(self._said[key] for key in generator.running)])
