"""What is known of the way from the origin to the sites, and between them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from infra.weights.weights_error import WeightsError

Link = tuple[str, str]  # source, site

_UNKNOWN = float(1 << 20)  # bytes a second of a link about which nothing at all is known


@dataclass(frozen=True)
class Links:
    """Who can fetch from whom. One in neither `rates` nor `untried` is not used (it failed lately, say)."""

    rates: Mapping[Link, float]  # bytes a second
    untried: Collection[Link] = ()  # may be used, and nobody has measured it
    latency: Mapping[Link, float] = field(default_factory=dict)  # seconds
    egress: Mapping[str, float] = field(default_factory=dict)  # bytes a second that all links from it share
    ingress: Mapping[str, float] = field(default_factory=dict)  # that all links to it share

    def guessed(self) -> dict[Link, float]:
        """All rates. An untried link is taken for half as fast as the slowest known one to its site.

        So it is used, and by that measured, where even that would help; and where it turns out to be far
        slower there was little on it.
        """
        known = dict(self.rates)
        slowest: dict[str, float] = {}
        for (_, site), rate in known.items():
            slowest[site] = min(rate, slowest.get(site, math.inf))
        otherwise = min(known.values(), default=2 * _UNKNOWN)
        guesses = {link: slowest.get(link[1], otherwise) / 2 for link in self.untried}
        return guesses | known


class Net(NamedTuple):
    """Links in numbers, the fastest first; node 0 is the origin."""

    source: np.ndarray
    target: np.ndarray
    rate: np.ndarray
    latency: np.ndarray
    room: np.ndarray  # bytes a second, out of each node and then into each; inf: no limit but the links'


def reached(links: Links, origin: str, sites: Collection[str]) -> list[str]:
    """The sites that links lead to from the origin, maybe over others; by name."""
    found, ways = [origin], list(links.guessed())
    for source in found:
        found += {site for start, site in ways if start == source and site in sites} - set(found)
    return sorted(found[1:])


def net_of(links: Links, nodes: Sequence[str]) -> Net:
    """The links between some nodes, of which the first is the origin."""
    place = {name: number for number, name in enumerate(nodes)}
    rates = links.guessed()
    for what, said in (("rate", rates), ("egress", links.egress), ("ingress", links.ingress)):
        for where, rate in said.items():
            if not 0 < rate < math.inf:
                raise WeightsError(
                    f"the {what} of {where} is {rate}: bytes a second are expected, more than 0"
                )
    used = sorted(
        (-rate, place[source], place[site], links.latency.get((source, site), 0.0))
        for (source, site), rate in rates.items()
        if source in place and place.get(site, 0) and source != site
    )
    table = np.array(used, np.float64).reshape(-1, 4)
    room = [side.get(name, math.inf) for side in (links.egress, links.ingress) for name in nodes]
    return Net(
        table[:, 1].astype(np.int64), table[:, 2].astype(np.int64), -table[:, 0], table[:, 3].copy(),
        np.array(room, np.float64),
    )  # fmt: skip
