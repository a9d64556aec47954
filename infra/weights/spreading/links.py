"""The links from the origin to the sites, and between sites, with rates that were measured or guessed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from infra.weights.weights_error import WeightsError

Link = tuple[str, str]  # source, site

_UNKNOWN = float(1 << 20)  # bytes a second: the guess if no link at all was measured


@dataclass(frozen=True)
class Links:
    """The links to be used. A link in neither `rates` nor `untried` is left out (it failed lately, say)."""

    rates: Mapping[Link, float]  # bytes a second
    untried: Collection[Link] = ()  # links that may be used, but were never measured
    latency: Mapping[Link, float] = field(default_factory=dict)  # seconds
    egress: Mapping[str, float] = field(default_factory=dict)  # by source: bytes a second of all its links
    ingress: Mapping[str, float] = field(default_factory=dict)  # by site: bytes a second of all links to it

    def guessed(self) -> dict[Link, float]:
        """Return all rates. An untried link is taken for half as fast as the slowest known one to its site.

        So an untried link is used, and thereby measured, where even that rate would help. If the link turns
        out far slower, little was planned for it.
        """
        known = dict(self.rates)
        slowest: dict[str, float] = {}
        for (_, site), rate in known.items():
            slowest[site] = min(rate, slowest.get(site, math.inf))
        otherwise = min(known.values(), default=2 * _UNKNOWN)
        guesses = {link: slowest.get(link[1], otherwise) / 2 for link in self.untried}
        return guesses | known


class Net(NamedTuple):
    """Links as arrays, the fastest first. Nodes are numbered, and node 0 is the origin."""

    source: np.ndarray
    target: np.ndarray
    rate: np.ndarray
    latency: np.ndarray
    room: np.ndarray  # bytes a second: out of each node, then into each; inf: only the links' limits


def reached(links: Links, origin: str, sites: Collection[str]) -> list[str]:
    """Return the sites that links lead to from the origin, maybe over other sites, sorted by name."""
    found, ways = [origin], list(links.guessed())
    for source in found:
        found += {site for start, site in ways if start == source and site in sites} - set(found)
    return sorted(found[1:])


def net_of(links: Links, nodes: Sequence[str]) -> Net:
    """Return the links between nodes, the first of which is the origin. Raises if a rate is not positive."""
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
