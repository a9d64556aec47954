"""Finds the links by which each chunk reaches all sites, so that the busiest link or port is done early.

A chunk's links form a tree. The first chunks take the fast links; load makes a link dear, and the next chunks
go around it. Together the trees come close to what the links can carry at most (Edmonds: as much as passes
the narrowest cut between the origin and a site; less where ports are narrower than their links).

Compiled, and without any operation whose result depends on the machine.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from infra.weights.spreading.links import Net

_ROUNDS = (4, 6)  # how often a load is squared in each round: busy links are dear, in the second very dear
_DEAREST = 1e3  # largest load that is squared: so all stays finite


@njit(cache=True, nogil=True)
def trees(net: Net, sizes: np.ndarray, have: np.ndarray) -> np.ndarray:
    """Return the link by which each node gets each chunk: [node, chunk], -1 where the node has the chunk."""
    nodes, chunks = have.shape
    by = np.full((nodes, chunks), -1)
    between = np.full((nodes, nodes), -1)
    for link in range(len(net.rate)):
        between[net.source[link], net.target[link]] = link
    room = np.concatenate((net.rate, net.room))
    busy = np.zeros(len(room))  # seconds: each link, each node's way out, each node's way in
    parent = np.zeros(nodes, np.int64)
    for squarings in _ROUNDS:
        for chunk in range(chunks):
            _move(net, room, busy, by[:, chunk], -sizes[chunk])
            branching(_costs(net, room, busy, sizes[chunk], have[:, chunk], squarings), parent)
            for node in range(1, nodes):
                if not have[node, chunk]:
                    by[node, chunk] = between[parent[node], node]
            _move(net, room, busy, by[:, chunk], sizes[chunk])
    return by


@njit(cache=True, nogil=True)
def _uses(net: Net, link: int) -> tuple[int, int, int]:
    """Return a link and its two ports, as places in `room`."""
    links = len(net.rate)
    return link, links + net.source[link], links + len(net.room) // 2 + net.target[link]


@njit(cache=True, nogil=True)
def _move(net: Net, room: np.ndarray, busy: np.ndarray, by: np.ndarray, size: float) -> None:
    """Add a chunk's seconds to its links and their ports; with a negative size, take them off."""
    for link in by:
        if link >= 0:
            for place in _uses(net, link):
                busy[place] += size / room[place]


@njit(cache=True, nogil=True)
def _costs(
    net: Net, room: np.ndarray, busy: np.ndarray, size: float, have: np.ndarray, squarings: int
) -> np.ndarray:
    """Return a chunk's cost over each link: [source, target]. The origin reaches nodes that have it for 0."""
    busiest = size / net.rate[0]
    for seconds in busy:
        busiest = max(busiest, seconds)
    cost = np.full((len(have), len(have)), np.inf)
    for link in range(len(net.rate)):
        if not have[net.target[link]]:
            price = 1e-9 / net.rate[link]
            for place in _uses(net, link):
                power = min((busy[place] + size / room[place]) / busiest, _DEAREST)
                for _ in range(squarings):
                    power *= power
                price += power / room[place]
            cost[net.source[link], net.target[link]] = price
    for node in range(1, len(have)):
        if have[node]:
            cost[0, node] = 0.0
    return cost


@njit(cache=True, nogil=True)
def branching(costs: np.ndarray, parent: np.ndarray) -> bool:
    """Find the cheapest tree from node 0 to all others, as each node's parent. Returns False if there is
    none.

    The algorithm is Chu and Liu's, and Edmonds': each node takes its cheapest link in. A cycle of such links
    becomes one node. A link into the cycle costs its own cost less that of the cycle's link that it replaces.
    """
    nodes = len(parent)
    cost = np.full((2 * nodes, 2 * nodes), np.inf)
    tail, head = np.zeros((2 * nodes, 2 * nodes), np.int64), np.zeros((2 * nodes, 2 * nodes), np.int64)
    for source in range(nodes):
        for node in range(nodes):
            cost[source, node] = costs[source, node]
            tail[source, node] = source  # the original link, where links lead to or from a cycle
            head[source, node] = node
    within = np.full(2 * nodes, -1)  # the cycle that a node is in; -1: none
    before = np.full(2 * nodes, -1)
    settled = np.zeros(2 * nodes, np.bool_)
    settled[0] = True
    count = nodes
    for start in range(1, nodes):
        node = _outermost(within, start, -1)
        seen = np.zeros(2 * nodes, np.bool_)
        while not settled[node]:
            if seen[node]:
                _contract(cost, tail, head, within, before, node, count)
                node, count = count, count + 1
            seen[node] = True
            best = 0
            for source in range(1, count):
                if within[source] < 0 and source != node and cost[source, node] < cost[best, node]:
                    best = source
            if cost[best, node] == np.inf:
                return False
            before[node] = best
            node = best
        node = _outermost(within, start, -1)
        while not settled[node]:
            settled[node] = True
            node = _outermost(within, before[node], -1)
    entered = np.zeros(2 * nodes, np.bool_)
    for node in range(count - 1, 0, -1):  # the link into a cycle replaces one of its own
        if not entered[node]:
            inner = head[before[node], node]
            parent[inner] = tail[before[node], node]
            while inner != node:
                entered[inner] = True
                inner = within[inner]
    return True


@njit(cache=True, nogil=True)
def _outermost(within: np.ndarray, node: int, new: int) -> int:
    """Return the outermost cycle that a node is in, leaving out the new one; the node itself if in none."""
    while within[node] >= 0 and within[node] != new:
        node = within[node]
    return node


@njit(cache=True, nogil=True)
def _contract(
    cost: np.ndarray, tail: np.ndarray, head: np.ndarray, within: np.ndarray, before: np.ndarray, node: int,
    new: int,
) -> None:  # fmt: skip
    """Make one node, `new`, of the cycle that a node is on."""
    while within[node] < 0:
        within[node] = new
        saved = cost[before[node], node]
        for other in range(new):
            if cost[node, other] < cost[new, other]:
                cost[new, other] = cost[node, other]
                tail[new, other] = tail[node, other]
                head[new, other] = head[node, other]
            if cost[other, node] - saved < cost[other, new]:
                cost[other, new] = cost[other, node] - saved
                tail[other, new] = tail[other, node]
                head[other, new] = head[other, node]
        node = _outermost(within, before[node], new)
