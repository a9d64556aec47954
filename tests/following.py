"""Sites that carry a plan out, in virtual time: when each has everything."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from infra.weights.manifest import Chunk
from infra.weights.spreading.links import Link, Links
from infra.weights.spreading.plan import Fetch, SpreadingPlan


def followed(
    plan: SpreadingPlan,
    chunks: Sequence[Chunk],
    sites: Mapping[str, Collection[str]],
    origin: str,
    links: Links,
) -> dict[str, float]:
    """Over each link one chunk after the other, in the plan's order, each as soon as may be."""
    sizes = {chunk.hash: chunk.size for chunk in chunks}
    has = {origin: set(sizes), **{name: set(held) for name, held in sites.items()}}
    queues: dict[Link, list[Fetch]] = {}
    for site, mine in plan.fetches.items():
        for one in mine:
            queues.setdefault((one.source, site), []).append(one)
    left: dict[Link, float] = {}
    lands: list[tuple[float, str, str]] = []  # when, where, what
    finish, now, rates = dict.fromkeys(sites, 0.0), 0.0, links.guessed()
    while any(queues.values()) or lands:
        for link, queue in queues.items():
            if queue and queue[0].chunk in has[link[0]] and queue[0].not_before <= now + 1e-12:
                left.setdefault(link, sizes[queue[0].chunk])
        speed = _fair(list(left), rates, links)
        events = [now + left[link] / speed[link] for link in left] + [at for at, _, _ in lands]
        events += [queue[0].not_before for queue in queues.values() if queue and queue[0].not_before > now]
        wait = min(events) - now
        now += wait
        for link in list(left):
            left[link] -= speed[link] * wait
            if left[link] <= 1e-9 * sizes[queues[link][0].chunk]:
                del left[link]
                lands.append((now + links.latency.get(link, 0.0), link[1], queues[link].pop(0).chunk))
        for landing in [one for one in lands if one[0] <= now + 1e-12]:
            lands.remove(landing)
            has[landing[1]].add(landing[2])
            finish[landing[1]] = now
    return finish


def _fair(busy: Sequence[Link], rates: Mapping[Link, float], links: Links) -> dict[Link, float]:
    """Water rises in all links alike, until a link is full, or an uplink or downlink."""
    speed = dict.fromkeys(busy, 0.0)
    rising = set(busy)
    while rising:
        ports = [
            (room - sum(speed[link] for link in busy if link[side] == name),
             {link for link in rising if link[side] == name})
            for side, rooms in enumerate((links.egress, links.ingress))
            for name, room in rooms.items()
        ]  # fmt: skip
        ports += [(rates[link] - speed[link], {link}) for link in rising]
        by = min(left / len(users) for left, users in ports if users)
        for link in rising:
            speed[link] += by
        rising -= set().union(*(users for left, users in ports if users and left / len(users) <= by + 1e-9))
    return speed
