"""What a plan is expected to cost: all instances decode on, event by event, with lengths drawn from beliefs.

One rule decides what a free slot gets, here and in the dispatcher: `pick`. It has two settings, a deadline
and a quantile z at which lengths are reckoned. Each instance is kept at a batch at which its longest sample
ends by the deadline, and takes the longest waiting sample that does so too; without a deadline that is
longest first.

    time ─►  instance 0  ██ few slots, the longest samples, fast steps
             instance 1  █████ more slots, shorter samples
             instance 2  █████████ all slots, the short ones, then whatever still ends in time
                                                                     deadline ┘
Compiled: a plan is chosen from hundreds of such runs.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit
from producers.dispatch.board import NO_DEADLINE

_EPSILON = 1e-9
OUTLIVED = 1.05  # a sample longer than all that was thought possible: so much longer still


@njit(cache=True, nogil=True)
def declared(belief: np.ndarray, tokens: float, z: float) -> float:
    """The length of a sample that has so many tokens already, at quantile z of what is still possible."""
    gone = int(np.searchsorted(belief, tokens, side="right"))
    left = len(belief) - gone
    if left <= 0:
        return float(tokens * OUTLIVED + 20.0)
    return float(belief[min(gone + int(z * left), len(belief) - 1)])


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
    """Which waiting sample a free slot takes: a place in `keys`, or -1 to leave it empty.

    keys: declared lengths of waiting samples, ascending; alive: which still wait; top: the last of those.
    longest: declared tokens that the instance's longest sample still needs. seconds[b]: a step of batch b.
    """
    if batch == 0:
        longest = keys[top]
    elif longest * seconds[batch + 1] > left_s:
        return -1
    low, high = batch + 1, len(seconds) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if longest * seconds[middle] <= left_s:
            low = middle
        else:
            high = middle - 1
    place = min(np.searchsorted(keys, left_s / seconds[low] + _EPSILON, side="right") - 1, top)
    while place >= 0 and not alive[place]:
        place -= 1
    if place < 0 and batch == 0:
        return top
    return place


@njit(cache=True, nogil=True)
def emptiest(batch: np.ndarray, tables: np.ndarray, slots: np.ndarray) -> int:
    """The instance with a free slot on which one more sample runs fastest; -1 if there is none."""
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
    """Take the first out of a heap of `size`."""
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
    """Seconds until all is done, from now on, and the sample that is done last.

    lengths: true ones of this draw. told: declared ones, as of now. order: samples by belief, shortest
    first. where: the instance that runs a sample, -1 if it waits, -2 if it is done. tokens: how many it has.
    stalls: seconds in which an instance does something else first.
    """
    n, count, most = len(lengths), len(tables), tables.shape[1] - 1
    running = np.empty((count, most), np.int64)  # a heap by end
    batch = np.zeros(count, np.int64)
    steps = np.zeros(count)  # that an instance has made since now
    at = stalls.copy()
    end = np.empty(n)  # the step of its instance at which a sample ends
    said = np.empty(n)  # the same as declared
    last = np.zeros(count)  # the largest of `said` on the instance
    due = np.full(count, NO_DEADLINE)  # when its next sample ends
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
    begin, stop = 0, count  # instances that are asked
    while left > 0:
        asked = begin
        while top >= 0 and asked < stop:
            i = emptiest(batch, tables, slots)
            if i < 0:
                break
            limit = deadline
            for k in range(count):  # if one will be late anyway, the others need not hurry
                if batch[k] > 0 and now + (last[k] - steps[k]) * tables[k, 1] > limit:
                    made = steps[k] + (now - at[k]) / tables[k, batch[k]]
                    limit = max(limit, now + (last[k] - made) * tables[k, 1])
            place = top
            if deadline < NO_DEADLINE and keys[top] * tables[i, batch[i] + 1] < deadline - now:
                # the longest can wait; else it starts at once wherever it is fastest, as without a deadline
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
        if due[event] >= NO_DEADLINE:  # nothing runs and nobody took anything: the deadline can't be kept
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
                if said[sample] <= steps[i]:  # longer than declared: declare anew
                    done = lengths[sample] - (end[sample] - steps[i])
                    said[sample] = steps[i] + declared(beliefs[sample], done, z) - done
                last[i] = max(last[i], said[sample])
        due[i] = NO_DEADLINE
        if batch[i] > 0:
            due[i] = now + (end[running[i, 0]] - steps[i]) * tables[i, batch[i]]
    return now, final


@njit(cache=True, nogil=True)
def expected(
    draws: np.ndarray, beliefs: np.ndarray, order: np.ndarray, where: np.ndarray, tokens: np.ndarray,
    tables: np.ndarray, slots: np.ndarray, stalls: np.ndarray, z: float, deadline: float,
    critical: np.ndarray,
) -> float:  # fmt: skip
    """Mean of the makespan over draws of all lengths; `critical`: how often each sample was the last."""
    total = 0.0
    told = np.empty(len(order))
    for sample in range(len(order)):
        told[sample] = declared(beliefs[sample], tokens[sample], z)
    for lengths in draws:
        seconds, final = makespan(
            lengths, beliefs, told, order, where, tokens, tables, slots, stalls, z, deadline
        )
        total += seconds
        critical[final] += 1
    return total / len(draws)
