"""From a plan to a better one, by trying: without luck, and for about a second at most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from infra.weights.spreading.links import Net
from infra.weights.spreading.transfers import Run, Ways, carried

_WORK = 25_000_000  # about a second
_TRIES = 12, 300  # at least, at most
_LEAST = 1 / 256  # of the time: a gain that is worth a try
_ENOUGH = 1.01  # of what can't be beaten


class Search:
    """Tries at carrying some chunks."""

    def __init__(self, net: Net, sizes: np.ndarray, have: np.ndarray) -> None:
        self._net, self._sizes, self._have = net, sizes, have
        self._missing = int(np.sum(~have))
        work = max(1, self._missing * (len(net.rate) + len(sizes) // 8))
        self._left = min(max(_WORK // work, _TRIES[0]), _TRIES[1])
        self._enough = _ENOUGH * _bound(net, sizes, have) if self._missing else 0.0

    def best(self, starts: Sequence[Ways]) -> Run:
        """The best that is found from some starts, one of which at least must lead to the end."""
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
        """One try."""
        self._left -= 1
        found = carried(self._net, self._sizes, self._have, ways, deadline)
        return found if len(found.link) == self._missing else None

    def _good(self, found: Run) -> bool:
        return found.finish.max() <= self._enough

    def _sooner(self, best: Run, ways: Ways) -> Run:
        """Better, if that is found: by a deadline, then by other ways for what the last site waits for."""
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
        """Links and chunks that the last arrival waited for, one after the other."""
        arrived: dict[tuple[int, int], int] = {}
        previous: dict[int, int] = {}
        before: list[int | None] = []  # over the same link
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
    """Less is better: the last site's time, then everybody's."""
    return float(found.finish.max()), math.fsum(found.finish)


def _bound(net: Net, sizes: np.ndarray, have: np.ndarray) -> float:
    """No plan is sooner: what a site lacks comes in, and what only the origin has goes out, at least once."""
    nodes = len(have)
    links = [np.bincount(side, net.rate, nodes) for side in (net.source, net.target)]
    room = np.minimum(net.room, np.concatenate(links))
    must = np.zeros(2 * nodes)
    must[0] = sizes[have.sum(0) == 1].sum()
    must[nodes:] = [sizes[~mine].sum() for mine in have]
    in_all = math.fsum(must[nodes:]) / math.fsum(room[:nodes])
    return float(np.max(must[must > 0] / room[must > 0], initial=in_all))
