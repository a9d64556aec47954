"""Simulates plans to find their expected makespan: all generators decode on, with lengths drawn from beliefs.

One rule, `reach`, decides what a free slot gets, here and in the dispatcher. It has two settings: a deadline,
and a quantile z of the beliefs at which lengths are declared. Each generator keeps its batch so small that
its longest sample ends by the deadline, and takes the longest waiting sample that ends by then too. Without a
deadline the rule is longest first.

    time ─►  generator 0  ██ few slots, the longest samples, fast steps
             generator 1  █████ more slots, shorter samples
             generator 2  █████████ all slots, the short ones, then whatever still ends in time
                                                                      deadline ┘

This code is compiled, since a plan is chosen from hundreds of simulations.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from producers.dispatch.board import NO_DEADLINE

_EPSILON = 1e-9
OUTLIVED = 1.05  # a sample that outlived its belief is declared so many times as long (and 20 tokens)


@njit(cache=True, nogil=True)
def declared(belief: np.ndarray, tokens: float, z: float) -> float:
    """Return a sample's declared length: quantile z of the believed lengths above the tokens that it has."""
    gone = int(np.searchsorted(belief, tokens, side="right"))
    left = len(belief) - gone
    if left <= 0:
        return float(tokens * OUTLIVED + 20.0)
    return float(belief[min(gone + int(z * left), len(belief) - 1)])


@njit(cache=True, nogil=True)
def reach(top: float, batch: int, longest: float, seconds: np.ndarray, left_s: float) -> float:
    """Return the greatest declared length that a free slot takes; far below 0 to leave the slot empty.

    top: the declared length of the longest that waits. batch: samples that the generator runs. longest:
    declared tokens that the longest of them still needs. seconds[b]: duration of a step with b samples.
    left_s: seconds to the deadline.
    """
    if batch == 0:
        longest = top
    elif longest * seconds[batch + 1] > left_s:
        return -NO_DEADLINE
    low, high = batch + 1, len(seconds) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if longest * seconds[middle] <= left_s:
            low = middle
        else:
            high = middle - 1
    return float(left_s / seconds[low] + _EPSILON)


@njit(cache=True, nogil=True)
def pick(
    keys: np.ndarray,
    alive: np.ndarray,
    top: int,
    batch: int,
    longest: float,
    seconds: np.ndarray,
    left_s: float,
) -> int:
    """Return which waiting sample a free slot takes: a place in `keys`, or -1 to leave the slot empty.

    keys: declared lengths of waiting samples, ascending; alive: which still wait; top: the last of those.
    The others: see `reach`. An empty generator takes the longest if nothing else is short enough.
    """
    most = reach(float(keys[top]), batch, longest, seconds, left_s)
    place = min(int(np.searchsorted(keys, most, side="right")) - 1, top)
    while place >= 0 and not alive[place]:
        place -= 1
    if place < 0 and batch == 0:
        return top
    return place


@njit(cache=True, nogil=True)
def emptiest(batch: np.ndarray, tables: np.ndarray, slots: np.ndarray) -> int:
    """Return the generator with a free slot on which one more sample runs fastest; -1 if there is none."""
    best, fastest = -1, NO_DEADLINE
    for i in range(len(batch)):
        if batch[i] < slots[i] and tables[i, batch[i] + 1] < fastest:
            best, fastest = i, tables[i, batch[i] + 1]
    return best


@njit(cache=True, nogil=True)
def _push(heap: np.ndarray, size: int, end: np.ndarray, sample: int) -> None:
    k = size
    while k > 0 and end[heap[(k - 1) // 2]] > end[sample]:
        heap[k] = heap[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k] = sample


@njit(cache=True, nogil=True)
def _pop(heap: np.ndarray, size: int, end: np.ndarray) -> None:
    """Remove the first from a heap of `size`."""
    last = heap[size - 1]
    size -= 1
    k = 0
    while 2 * k + 1 < size:
        child = 2 * k + 1
        if child + 1 < size and end[heap[child + 1]] < end[heap[child]]:
            child += 1
        if end[heap[child]] >= end[last]:
            break
        heap[k] = heap[child]
        k = child
    heap[k] = last


@njit(cache=True, nogil=True)
def makespan(
    lengths: np.ndarray, beliefs: np.ndarray, told: np.ndarray, order: np.ndarray, where: np.ndarray,
    tokens: np.ndarray, tables: np.ndarray, slots: np.ndarray, stalls: np.ndarray, z: float, deadline: float,
) -> tuple[float, int]:  # fmt: skip
    """Return the seconds until all samples are done, and the sample that is done last.

    lengths: true ones in this draw. told: declared ones, as of now. order: samples by belief, shortest first.
    where: the generator that runs a sample, -1 if it waits, -2 if it is done. tokens: how many each has
    already. stalls: seconds that each generator loses first. z, deadline: the settings, the deadline in
    seconds from now.
    """
    n, count, most = len(lengths), len(tables), tables.shape[1] - 1
    running = np.empty((count, most), np.int64)  # a heap by end
    batch = np.zeros(count, np.int64)
    steps = np.zeros(count)  # steps of each generator since now
    at = stalls.copy()
    end = np.empty(n)  # the step of its generator at which a sample ends
    said = np.empty(n)  # the step at which its declared length ends
    last = np.zeros(count)  # the largest `said` on the generator
    due = np.full(count, NO_DEADLINE)  # when the generator's next sample ends
    waiting = np.empty(n, np.int64)
    keys = np.empty(n)
    left = size = 0
    for sample in order:
        i = where[sample]
        if i == -2:
            continue
        left += 1
        if i == -1:
            waiting[size] = sample
            keys[size] = (
                max(told[sample], keys[size - 1]) if size else told[sample]
            )  # ascending, as `pick` needs them
            size += 1
        else:
            end[sample] = max(lengths[sample] - tokens[sample], 1.0)
            said[sample] = told[sample] - tokens[sample]
            last[i] = max(last[i], said[sample])
            _push(running[i], batch[i], end, sample)
            batch[i] += 1
    for i in range(count):
        if batch[i] > 0:
            due[i] = at[i] + end[running[i, 0]] * tables[i, batch[i]]
    keys = keys[:size]
    alive = np.ones(size, np.bool_)
    top = size - 1
    now = 0.0
    final = -1
    begin, stop = 0, count  # generators whose free slots are filled
    while left > 0:
        asked = begin
        while top >= 0 and asked < stop:
            i = emptiest(batch, tables, slots)
            if i < 0:
                break
            limit = deadline
            for k in range(count):  # if one is late anyway, the others need not hurry
                if batch[k] > 0 and now + (last[k] - steps[k]) * tables[k, 1] > limit:
                    made = steps[k] + (now - at[k]) / tables[k, batch[k]]
                    limit = max(limit, now + (last[k] - made) * tables[k, 1])
            place = top
            if deadline < NO_DEADLINE and keys[top] * tables[i, batch[i] + 1] < deadline - now:
                # the longest can wait; else it starts at once where it runs fastest, as without a deadline
                i = asked
                if batch[i] >= slots[i]:
                    asked += 1
                    continue
                place = pick(
                    keys, alive, top, batch[i], last[i] - steps[i], tables[i, : slots[i] + 1], limit - now
                )
                if place < 0:
                    asked += 1
                    continue
            sample = waiting[place]
            alive[place] = False
            while top >= 0 and not alive[top]:
                top -= 1
            if batch[i] > 0:
                steps[i] += (now - at[i]) / tables[i, batch[i]]
            at[i] = now
            end[sample] = steps[i] + lengths[sample]
            said[sample] = steps[i] + keys[place]
            last[i] = max(last[i], said[sample])
            _push(running[i], batch[i], end, sample)
            batch[i] += 1
            due[i] = now + (end[running[i, 0]] - steps[i]) * tables[i, batch[i]]
        event = int(np.argmin(due))
        if due[event] >= NO_DEADLINE:  # nothing runs, and no sample was taken: the deadline can't be kept
            deadline = NO_DEADLINE
            continue
        now, i = due[event], event
        begin, stop = i, i + 1
        steps[i], at[i] = end[running[i, 0]], now
        rescan = False
        while batch[i] > 0 and end[running[i, 0]] <= steps[i] + 1e-6:
            final = running[i, 0]
            rescan |= said[running[i, 0]] >= last[i] - 1e-6
            _pop(running[i], batch[i], end)
            batch[i] -= 1
            left -= 1
        if rescan or last[i] <= steps[i]:
            last[i] = steps[i]
            for k in range(batch[i]):
                sample = running[i, k]
                if said[sample] <= steps[i]:  # longer than declared: declare it anew
                    done = lengths[sample] - (end[sample] - steps[i])
                    said[sample] = steps[i] + declared(beliefs[sample], done, z) - done
                last[i] = max(last[i], said[sample])
        due[i] = NO_DEADLINE
        if batch[i] > 0:
            due[i] = now + (end[running[i, 0]] - steps[i]) * tables[i, batch[i]]
    return now, final


@njit(cache=True, nogil=True)
def makespans(
    draws: np.ndarray, beliefs: np.ndarray, order: np.ndarray, where: np.ndarray, tokens: np.ndarray,
    tables: np.ndarray, slots: np.ndarray, stalls: np.ndarray, z: float, deadline: float,
    critical: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Return the makespan of each draw. `critical[i]` is raised each time that sample i ends last."""
    told = np.empty(len(order))
    for sample in range(len(order)):
        told[sample] = declared(beliefs[sample], tokens[sample], z)
    found = np.empty(len(draws))
    for draw in range(len(draws)):
        found[draw], final = makespan(
            draws[draw], beliefs, told, order, where, tokens, tables, slots, stalls, z, deadline
        )
        critical[final] += 1
    return found
