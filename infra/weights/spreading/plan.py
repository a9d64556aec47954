"""Plans which site fetches which chunk from where, so that the last site has everything as early as can be.

    a tree for each chunk ─┬─► only these ways ───────────┐
                           ├─► any way over their links ──┤
                           └─► both, but patiently ───────┼─► tried anew, for less and less time ─► the best
    any way at all ───────────────────────────────────────┤
    all from the origin ──────────────────────────────────┘

Every relay makes the plan by itself from the same records; the same input makes the same plan everywhere. A
site fetches from all its sources at once, and from each source one chunk after the other, in the order of the
plan. If a source does not have the next chunk yet, the site waits for that chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Links, net_of, reached
from infra.weights.spreading.search import Search
from infra.weights.spreading.transfers import Run, Ways
from infra.weights.spreading.trees import trees
from infra.weights.weights_error import WeightsError


@dataclass(frozen=True)
class Fetch:
    """A chunk that a site fetches. Seconds count from the plan's start."""

    chunk: str  # its hash
    source: str
    not_before: float  # seconds, to leave a narrow uplink to others; mostly 0
    arrives: float  # seconds, as expected


@dataclass(frozen=True)
class SpreadingPlan:
    """The chunks that each site fetches, in order, and when each site has everything."""

    fetches: Mapping[str, tuple[Fetch, ...]]
    finish: Mapping[str, float]
    unreached: tuple[str, ...] = ()  # sites that no link leads to: nobody waits for them

    @property
    def last(self) -> float:
        """Seconds until the last site has everything."""
        return max(self.finish.values(), default=0.0)


def spread(
    chunks: Sequence[Chunk], sites: Mapping[str, Collection[str]], origin: str, links: Links
) -> SpreadingPlan:
    """Return the plan. `sites` has the hashes of the chunks that each site holds; the origin holds all."""
    task = _Task(chunks, sites, origin, links)
    if task.have.all():
        return alone(chunks, sites, origin, links)
    by = trees(task.net, task.sizes, task.have)
    only = np.any(by[:, None, :] == np.arange(len(task.net.rate))[:, None], axis=0)
    over = np.broadcast_to(only.any(axis=1, keepdims=True), only.shape).copy()
    starts = [task.from_origin, _freely(only), _freely(over), _freely(np.ones_like(only))]
    if np.isfinite(task.net.room).any():
        starts += [Ways(may, only @ task.sizes) for may in (only, over)]
    return task.plan(task.search.best(starts))


def alone(
    chunks: Sequence[Chunk], sites: Mapping[str, Collection[str]], origin: str, links: Links
) -> SpreadingPlan:
    """Return the plan in which all sites fetch everything from the origin, for comparison with `spread`."""
    task = _Task(chunks, sites, origin, links)
    found = task.search.attempt(task.from_origin)
    if found is None:
        raise WeightsError(f"a site has no link from {origin}: not all can fetch everything there")
    return task.plan(found)


def _freely(may: np.ndarray) -> Ways:
    return Ways(may, np.zeros(len(may)))


class _Task:
    """The arguments of `spread` as arrays."""

    def __init__(
        self, chunks: Sequence[Chunk], sites: Mapping[str, Collection[str]], origin: str, links: Links
    ) -> None:
        if origin in sites:
            raise WeightsError(f"{origin} is the origin, and can't be a site that fetches from it")
        sizes = {chunk.hash: chunk.size for chunk in chunks}  # one that is named twice is fetched once
        self._chunks, self._nodes = list(sizes), [origin, *reached(links, origin, sites)]
        self._unreached = tuple(sorted(set(sites).difference(self._nodes)))
        self.net = net_of(links, self._nodes)
        self.sizes = np.array(list(sizes.values()), np.float64)
        held = [set(sizes), *(set(sites[name]) for name in self._nodes[1:])]
        self.have = np.array([[chunk in mine for chunk in sizes] for mine in held], np.bool_)
        self.from_origin = _freely(np.repeat((self.net.source == 0)[:, None], len(sizes), axis=1))
        self.search = Search(self.net, self.sizes, self.have)

    def plan(self, found: Run) -> SpreadingPlan:
        fetches: dict[str, list[Fetch]] = {name: [] for name in self._nodes[1:]}
        finish = dict.fromkeys(fetches, 0.0)
        for link, chunk, begins, arrives, held in zip(*found[:5], strict=True):
            source, site = self._nodes[self.net.source[link]], self._nodes[self.net.target[link]]
            not_before = float(begins) if held else 0.0
            fetches[site].append(Fetch(self._chunks[chunk], source, not_before, float(arrives)))
            finish[site] = max(finish[site], float(arrives))
        return SpreadingPlan({name: tuple(mine) for name, mine in fetches.items()}, finish, self._unreached)
