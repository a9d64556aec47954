"""How early the last site could have everything at best: no plan beats it.

A site gets what it lacks no faster than the largest flow that links, uplinks and downlinks let through to it.
Where only the links are narrow, and chunks are small, all sites can have that at once (Edmonds).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Links

Side = tuple[str, str]  # of a place: in, out
_ALL = ("", "")  # who has something at the start


def bound(chunks: Sequence[Chunk], sites: Mapping[str, Collection[str]], origin: str, links: Links) -> float:
    """Seconds."""
    found = 0.0
    for site, held in sites.items():
        if lacks := sum(chunk.size for chunk in chunks if chunk.hash not in held):
            full = [origin, *(name for name, other in sites.items() if other and name != site)]
            found = max(found, lacks / _flow(_room(full, sites, links), (site, "has")))
    return found


def _room(full: Sequence[str], sites: Collection[str], links: Links) -> dict[Side, dict[Side, float]]:
    """What fits through each edge, and back through it: nothing yet."""
    room: dict[Side, dict[Side, float]] = {_ALL: {}}
    names = {*full, *sites}
    for name in names:
        room[name, "in"] = {(name, "has"): links.ingress.get(name, math.inf)}
        room[name, "has"] = {(name, "out"): links.egress.get(name, math.inf)}
        room[name, "out"] = {}
    for (source, site), rate in links.guessed().items():
        if source in names and site in sites:
            room[source, "out"][site, "in"] = rate
    room[_ALL] = {(name, "has"): math.inf for name in full}
    for side, others in list(room.items()):
        for other in list(others):
            room[other].setdefault(side, 0.0)
    return room


def _flow(room: dict[Side, dict[Side, float]], goal: Side) -> float:
    """The largest flow, along one shortest way after the other."""
    total = 0.0
    while True:
        before: dict[Side, Side] = {}
        ahead = [_ALL]
        for side in ahead:
            for other, left in room[side].items():
                if left > 1e-9 and other not in before and other != _ALL:
                    before[other] = side
                    ahead.append(other)
        if goal not in before:
            return total
        way = [goal]
        while way[-1] != _ALL:
            way.append(before[way[-1]])
        steps = list(zip(way[1:], way, strict=False))
        least = min(room[source][target] for source, target in steps)
        total += least
        for source, target in steps:
            room[source][target] -= least
            room[target][source] += least
