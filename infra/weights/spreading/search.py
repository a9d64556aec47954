"""Improves plans by trying others, without randomness and in about a second at most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from infra.weights.spreading.links import Net
from infra.weights.spreading.transfers import Run, Ways, carried

_WORK = 25_000_000  # operations, about a second
_TRIES = 12, 300  # fewest, most
_LEAST = 1 / 256  # of a plan's time: smaller gains are not worth a try
_ENOUGH = 1.01  # times `_bound`: a plan so good is not improved any more


class Search:
    """Tries different ways to carry some chunks over a net."""

    def __init__(self, net: Net, sizes: np.ndarray, have: np.ndarray) -> None:
        self._net, self._sizes, self._have = net, sizes, have
        self._missing = int(np.sum(~have))
        work = max(1, self._missing * (len(net.rate) + len(sizes) // 8))
        self._left = min(max(_WORK // work, _TRIES[0]), _TRIES[1])
        self._enough = _ENOUGH * _bound(net, sizes, have) if self._missing else 0.0

    def best(self, starts: Sequence[Ways]) -> Run:
        """Return the best plan found from some starts. At least one start must carry everything."""
        found = []
        for ways in starts:
            tried = self.attempt(ways)
            if tried is not None:
                found.append((tried, ways))
                if self._good(tried):
                    break
        found.sort(key=lambda one: rank(one[0]))
        best = found[0][0]
        for tried, ways in found:
            if not self._good(best):
                best = min(best, self._sooner(tried, ways), key=rank)
        return best

    def attempt(self, ways: Ways, deadline: float = math.inf) -> Run | None:
        """Make one plan. Returns None if it does not carry everything by the deadline, in seconds."""
        self._left -= 1
        found = carried(self._net, self._sizes, self._have, ways, deadline)
        return found if len(found.link) == self._missing else None

    def _good(self, found: Run) -> bool:
        return found.finish.max() <= self._enough

    def _sooner(self, best: Run, ways: Ways) -> Run:
        """Look for a sooner plan: by a deadline, then by other links for what the last site waits for."""
        stop = self._left // 3
        hopeless = self._enough
        while best.finish.max() - hopeless > _LEAST * hopeless and self._left > stop:
            deadline = (hopeless + float(best.finish.max())) / 2
            found = self.attempt(ways, deadline)
            best, hopeless = (best, deadline) if found is None else (found, hopeless)
        moved = True
        while moved:
            moved = False
            for link, chunk in self._last(best):
                if self._left <= stop or self._good(best):
                    return best
                other = Ways(ways.may.copy(), ways.quota)
                other.may[self._net.target == self._net.target[link], chunk] = True
                other.may[link, chunk] = False
                found = self.attempt(other, float(best.finish.max()))
                if found is not None and rank(found) < rank(best):
                    ways, best, moved = other, found, True
                    break
        return best

    def _last(self, found: Run) -> Iterator[tuple[int, int]]:
        """Yield the links and chunks that the last arrival waited for, from the latest to the earliest."""
        arrived: dict[tuple[int, int], int] = {}
        previous: dict[int, int] = {}
        before: list[int | None] = []  # the previous transfer over the same link
        for place, (link, chunk) in enumerate(zip(found.link, found.chunk, strict=True)):
            arrived[self._net.target[link], chunk] = place
            before.append(previous.get(link))
            previous[link] = place
        at: int | None = int(found.arrives.argmax())
        while at is not None:
            link, chunk = int(found.link[at]), int(found.chunk[at])
            yield link, chunk
            source = arrived.get((self._net.source[link], chunk))
            waited = source is not None and found.arrives[source] == found.begins[at]
            at = source if waited else before[at]


def rank(found: Run) -> tuple[float, float]:
    """Return what plans are compared by, less is better: the last site's time, then the sum of all times."""
    return float(found.finish.max()), math.fsum(found.finish)


def _bound(net: Net, sizes: np.ndarray, have: np.ndarray) -> float:
    """Return seconds that no plan beats: sites must get what they lack, the origin send what only it has."""
    nodes = len(have)
    links = [np.bincount(side, net.rate, nodes) for side in (net.source, net.target)]
    room = np.minimum(net.room, np.concatenate(links))
    must = np.zeros(2 * nodes)
    must[0] = sizes[have.sum(0) == 1].sum()
    must[nodes:] = [sizes[~mine].sum() for mine in have]
    in_all = math.fsum(must[nodes:]) / math.fsum(room[:nodes])
    return float(np.max(must[must > 0] / room[must > 0], initial=in_all))
