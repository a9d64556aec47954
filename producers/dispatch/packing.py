"""Finds which running samples should move so that all end by a deadline: a sample that is late in a full batch.

Each sample stands a largest batch at which it still ends by the deadline. Where a generator's batch is larger
than one of its samples stands, either those samples go to a smaller batch, or others leave: whichever is less
to prefill.
"""

from __future__ import annotations

import numpy as np

from infra.compiled import njit

HASTE = 1.03  # a sample that can't end in time gets steps at most so many times as long as alone


@njit(cache=True, nogil=True)
def _stands(left: float, left_s: float, seconds: np.ndarray, slots: int) -> int:
    """Return the largest batch at which so many tokens are made in time; at least 1."""
    pace = max(left_s / left, seconds[1] * HASTE) + 1e-12
    low, high = 1, slots
    while low < high:
        middle = (low + high + 1) // 2
        if seconds[middle] <= pace:
            low = middle
        else:
            high = middle - 1
    return low


@njit(cache=True, nogil=True)
def repack(
    where: np.ndarray, left: np.ndarray, tokens: np.ndarray, tables: np.ndarray, slots: np.ndarray,
    deadline: float, most: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return rows of samples to move, and their new generators. `where` becomes what it is then.

    left: tokens that each sample is declared to need yet. tokens: those that it has. deadline: seconds from
    now. most: no more moves than this.
    """
    count = len(tables)
    rows = np.empty(most, np.int64)
    targets = np.empty(most, np.int64)
    batch = np.zeros(count, np.int64)
    cap = slots.copy()
    running = np.flatnonzero(where >= 0)
    for row in running:
        i = where[row]
        batch[i] += 1
        cap[i] = min(cap[i], _stands(left[row], deadline, tables[i], slots[i]))
    given_up = np.zeros(count, np.bool_)
    moved = 0
    while moved < most:
        worst, source = 1.0, -1
        for i in range(count):
            if batch[i] > cap[i] and not given_up[i]:
                late = tables[i, batch[i]] / tables[i, cap[i]]
                if late > worst:
                    worst, source = late, i
        if source < 0:
            break
        # those that leave: from the most demanding on, or from the least demanding on
        hasty = 0
        first, last = -1, -1
        least, widest = slots[source] + 1, -1.0
        for row in running:
            if where[row] != source:
                continue
            stands = _stands(left[row], deadline, tables[source], slots[source])
            if stands < batch[source]:
                hasty += 1
            if stands < least or (stands == least and tokens[row] < tokens[first]):
                least, first = stands, row
            spare = left[row] + tokens[row]  # what is left costs room, and what is made costs a prefill
            if stands > cap[source] and (last < 0 or spare < widest):
                widest, last = spare, row
        excess = batch[source] - cap[source]
        done = False
        for attempt in range(2):
            flee = (hasty <= excess) == (attempt == 0)
            row = first if flee else last
            if row < 0:
                continue
            best, fullest = -1, -1.0
            for i in range(count):
                if i == source or batch[i] >= slots[i]:
                    continue
                stands = _stands(left[row], deadline, tables[i], slots[i])
                room = min(cap[i], stands)
                if batch[i] + 1 > room:
                    continue
                # the fullest that is good enough, so that others keep their room
                share = tables[i, batch[i] + 1]
                if share > fullest:
                    best, fullest = i, share
            if best < 0:
                continue
            rows[moved], targets[moved] = row, best
            moved += 1
            where[row] = best
            batch[best] += 1
            cap[best] = min(cap[best], _stands(left[row], deadline, tables[best], slots[best]))
            batch[source] -= 1
            cap[source] = slots[source]
            for other in running:
                if where[other] == source:
                    cap[source] = min(
                        cap[source], _stands(left[other], deadline, tables[source], slots[source])
                    )
            done = True
            break
        if not done:
            given_up[source] = True
    return rows[:moved], targets[:moved]
