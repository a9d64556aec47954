"""Simulates all transfers of a version, event by event: when does each site have everything?

    origin ═ c3 ═► paris   c1 c2     each link carries one chunk after the other; links that share a port too
    origin ═ c4 ═► tokyo   c2        narrow for all get fair shares of it (max-min, as TCP about does)
    paris  ─ c1 ─► tokyo

A free link takes a chunk that its source has and its site lacks, the one with the fewest copies first: so
sites fetch different chunks from the origin, and swap them. No link takes a chunk that would end behind a
deadline. A patient link leaves a port to others while the port is full; of patient links, the one most behind
its quota comes first. Latency delays arrivals, but does not occupy the link: requests are sent ahead.

Compiled, and all in one file: numba's cache does not notice changes in other files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infra.compiled import njit
from infra.weights.spreading.links import Net

_NONE, _ANY = -1, -2  # chunks that a free link looks at: none, any, or the one with this number
_FITS = 0.25  # of a link's rate: a patient link begins only if its ports have so much left


class Ways(NamedTuple):
    """Which chunk may go over which link."""

    may: np.ndarray  # [link, chunk]
    quota: np.ndarray  # bytes that a patient link is to carry; 0: the link is not patient


class Run(NamedTuple):
    """Transfers in the order in which they begin, and when each node has all that it will get."""

    link: np.ndarray
    chunk: np.ndarray
    begins: np.ndarray
    arrives: np.ndarray
    held: np.ndarray  # whether a patient link could have begun before, and waited
    finish: np.ndarray


class _State(NamedTuple):
    has: np.ndarray  # [node, chunk]
    comes: np.ndarray  # [node, chunk]: the node has the chunk, or will get it
    copies: np.ndarray  # of each chunk, with those under way
    carries: np.ndarray  # of each link: the number of its transfer, or _NONE
    look: np.ndarray  # of each link: _NONE, _ANY, or the chunk to look at
    held: np.ndarray  # of each link: whether it was patient and waited
    largest: np.ndarray  # of each link: bytes of a chunk that would end before the deadline
    sent: np.ndarray  # of each link: bytes
    users: np.ndarray  # of each port: how many links use it
    wish: np.ndarray  # of each port: the sum of the rates of these links


@njit(cache=True, nogil=True)
def carried(net: Net, sizes: np.ndarray, have: np.ndarray, ways: Ways, deadline: float) -> Run:
    """Carry what may be carried. Returns fewer transfers than are needed if not all can be made."""
    links, most, state = len(net.rate), have.size, _begin(net, have)
    made = Run(
        np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most), np.zeros(most),
        np.zeros(most, np.bool_), np.zeros(len(have)),
    )  # fmt: skip
    left, rate, fair, ends = np.zeros(links), np.zeros(links), np.zeros(links), np.full(links, np.inf)
    landing = np.zeros(most, np.int64)  # transfers that are sent and have not arrived
    begun, coming, now = 0, 0, 0.0
    while True:
        link = _next(net, ways, state)
        while link >= 0:
            chunk = _rarest(net, sizes, ways, state, link, deadline - now)
            if chunk >= 0:
                made.link[begun], made.chunk[begun] = link, chunk
                made.begins[begun], made.held[begun] = now, state.held[link]
                state.carries[link], left[link], rate[link] = begun, sizes[chunk], 0.0
                _take(net, state, link, chunk, sizes[chunk])
                begun += 1
            state.look[link], state.held[link] = _NONE, False
            link = _next(net, ways, state)
        _share(net, state.carries >= 0, state.users, fair)
        event = np.inf
        for link in range(links):
            if fair[link] != rate[link]:
                rate[link] = fair[link]
                ends[link] = now + max(left[link], 0.0) / rate[link] if rate[link] else np.inf
            event = min(event, ends[link])
        for place in landing[:coming]:
            event = min(event, made.arrives[place])
        if event == np.inf:
            break
        for link in range(links):
            left[link] -= rate[link] * (event - now)
            if ends[link] <= event:
                made.arrives[state.carries[link]] = event + net.latency[link]
                landing[coming] = state.carries[link]
                coming += 1
                _free(net, state, link)
        now, before, coming = event, coming, 0
        for place in landing[:before]:
            if made.arrives[place] > now:
                landing[coming] = place
                coming += 1
            else:
                made.finish[net.target[made.link[place]]] = now
                _arrive(net, state, net.target[made.link[place]], made.chunk[place])
    return Run(
        made.link[:begun], made.chunk[:begun], made.begins[:begun], made.arrives[:begun], made.held[:begun],
        made.finish,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _begin(net: Net, have: np.ndarray) -> _State:
    links, sides = len(net.rate), len(net.room)
    copies = np.zeros(have.shape[1], np.int64)
    for node in range(len(have)):
        for chunk in range(len(copies)):
            copies[chunk] += have[node, chunk]
    return _State(
        have.copy(), have.copy(), copies, np.full(links, _NONE), np.full(links, _ANY),
        np.zeros(links, np.bool_), np.full(links, np.inf), np.zeros(links), np.zeros(sides, np.int64),
        np.zeros(sides),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _ports(net: Net, link: int) -> tuple[int, int]:
    """Return a link's ports, as places in `room`: the one out of its source, and the one into its site."""
    return net.source[link], len(net.room) // 2 + net.target[link]


@njit(cache=True, nogil=True)
def _next(net: Net, ways: Ways, state: _State) -> int:
    """Return the link whose turn it is to look for a chunk; `_NONE` if there is none."""
    best = _NONE
    for link in range(len(net.rate)):
        if state.carries[link] >= 0 or state.look[link] == _NONE:
            continue
        if not ways.quota[link]:
            return link
        full = False
        for port in _ports(net, link):
            free = net.room[port] - state.wish[port]
            full = full or (state.users[port] and free < _FITS * min(net.rate[link], net.room[port]))
        if full:
            state.held[link] = True
        elif best < 0 or state.sent[link] * ways.quota[best] < state.sent[best] * ways.quota[link]:
            best = link
    return best


@njit(cache=True, nogil=True)
def _rarest(net: Net, sizes: np.ndarray, ways: Ways, state: _State, link: int, left_s: float) -> int:
    """Return the chunk that a free link takes, of those that would arrive within `left_s`; or `_NONE`."""
    fair = net.rate[link]
    for port in _ports(net, link):
        fair = min(fair, net.room[port] / (state.users[port] + 1))
    # A chunk that is too large once stays so: a site that follows the plan would not wait until it fits.
    state.largest[link] = min(state.largest[link], (left_s - net.latency[link]) * fair)
    source, target, look = net.source[link], net.target[link], state.look[link]
    first, last = (0, len(sizes)) if look == _ANY else (look, look + 1)
    best = _NONE
    for chunk in range(first, last):
        if state.comes[target, chunk] or not state.has[source, chunk] or not ways.may[link, chunk]:
            continue
        if sizes[chunk] <= state.largest[link] and (best < 0 or state.copies[chunk] < state.copies[best]):
            best = chunk
    return best


@njit(cache=True, nogil=True)
def _take(net: Net, state: _State, link: int, chunk: int, size: float) -> None:
    state.comes[net.target[link], chunk] = True
    state.copies[chunk] += 1
    state.sent[link] += size
    for port in _ports(net, link):
        state.users[port] += 1
        state.wish[port] += net.rate[link]


@njit(cache=True, nogil=True)
def _free(net: Net, state: _State, link: int) -> None:
    state.carries[link], state.look[link] = _NONE, _ANY
    for port in _ports(net, link):
        state.users[port] -= 1
        state.wish[port] -= net.rate[link]


@njit(cache=True, nogil=True)
def _arrive(net: Net, state: _State, node: int, chunk: int) -> None:
    state.has[node, chunk] = True
    for link in range(len(net.source)):
        if net.source[link] == node:
            state.look[link] = chunk if state.look[link] == _NONE else _ANY


@njit(cache=True, nogil=True)
def _share(net: Net, busy: np.ndarray, users: np.ndarray, rate: np.ndarray) -> None:
    """Set the rates. All busy links grow alike, each until it or one of its ports is full (max-min)."""
    same = True
    for link in range(len(rate)):
        same = same and busy[link] == (rate[link] > 0)
    if same:  # links that were done have begun their next chunks
        return
    rate[:] = 0.0
    room, growing = net.room.copy(), users.copy()
    while True:
        narrowest, level = -1, np.inf
        for port in range(len(room)):
            if growing[port] and (narrowest < 0 or room[port] / growing[port] < level):
                narrowest, level = port, room[port] / growing[port]
        if narrowest < 0:
            return
        found = False
        for by_port in (False, True):  # links that a fair share fills; else links of the narrowest port
            for link in range(len(rate)):
                mine = _ports(net, link)
                full = narrowest in mine if by_port else net.rate[link] <= level
                if full and busy[link] and not rate[link]:
                    found = True
                    least = 1e-6 * net.rate[link]  # rounding may leave nothing of a port
                    rate[link] = min(net.rate[link], max(level, least))
                    for port in mine:
                        growing[port] -= 1
                        room[port] -= rate[link]
            if found:
                break
