"""Running samples that go on elsewhere, where that is expected to pay for the prefill.

One by one: what is most often the last goes to where it runs faster. Or many at once: batches are levelled,
so that an instance that has run out takes its share. What is expected decides, and nothing moves in vain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from producers.dispatch.board import NO_DEADLINE
from producers.dispatch.state import LONGEST_FIRST, SampleTable, Setting

MOST_MOVES = 4  # one by one
_LEAST_GAIN = 0.0005  # of a move
_LEAST_LEVELLED = 0.005  # of many

Move = tuple[int, int]  # a sample's row, and the instance that it goes to


def find_moves(
    state: SampleTable, draws: np.ndarray, setting: Setting, move_s: float
) -> tuple[list[Move], Setting, float]:
    """Moves, the setting that is best with them, and what is expected then. The state is as after them."""
    ends = state.expected(draws, setting)
    moves, setting, ends = _levelled(state, draws, setting, ends, move_s)
    for _ in range(MOST_MOVES):
        best = _best_single(state, draws, setting, ends, move_s)
        if best is None:
            break
        ends, (row, target) = best
        state.move(row, target, move_s * state.tokens[row])
        moves.append((row, target))
    return moves, setting, ends


def _best_single(
    state: SampleTable, draws: np.ndarray, setting: Setting, ends: float, move_s: float
) -> tuple[float, Move] | None:
    critical = np.zeros(len(state.where), np.int64)
    state.expected(draws, setting, critical)
    steps = _next_steps(state)
    found = None
    for row in np.argsort(-critical)[:2].tolist():
        source = int(state.where[row])
        if source < 0 or not critical[row]:
            continue
        for target in np.argsort(steps)[:2].tolist():
            if target == source or steps[target] >= NO_DEADLINE:
                continue
            stall_s = move_s * state.tokens[row]
            state.move(row, target, stall_s)
            there = state.expected(draws, setting)
            state.move(row, source, 0.0)
            state.stalls[target] -= stall_s
            if there < ends * (1 - _LEAST_GAIN) and (found is None or there < found[0]):
                found = there, (row, target)
    return found


def _levelled(
    state: SampleTable, draws: np.ndarray, setting: Setting, ends: float, move_s: float
) -> tuple[list[Move], Setting, float]:
    """The youngest go first, since they cost least, or those that may go on for longest."""
    where, stalls = state.where.copy(), state.stalls.copy()
    left = np.median(state.beliefs, axis=1) - state.tokens
    found: tuple[float, Setting, Sequence[Move]] = ends * (1 - _LEAST_LEVELLED), setting, ()
    for preferred in (-state.tokens, left):
        moves = _level(state, preferred)
        for count in sorted({len(moves), len(moves) // 3} - {0}):
            for row, target in moves[:count]:
                state.move(row, target, move_s * state.tokens[row])
            for one in {setting, LONGEST_FIRST} if count == len(moves) else {setting}:
                there = state.expected(draws, one)
                if there < found[0]:
                    found = there, one, moves[:count]
            state.where[:], state.stalls[:] = where, stalls
    if not found[2]:
        return [], setting, ends
    for row, target in found[2]:
        state.move(row, target, move_s * state.tokens[row])
    return list(found[2]), found[1], found[0]


def _level(state: SampleTable, preferred: np.ndarray) -> list[Move]:
    """From the instance with the slowest steps to where they are fastest, until there is no difference."""
    rows = {
        source: sorted(np.flatnonzero(state.where == source).tolist(), key=lambda row: preferred[row])
        for source in range(len(state.slots))
    }
    batch = state.batch()
    moves: list[Move] = []
    while True:
        now = np.array(
            [table[count] if count else 0.0 for table, count in zip(state.tables, batch, strict=True)]
        )
        then = _steps(state, batch + 1)
        source, target = int(np.argmax(now)), int(np.argmin(then))
        if source == target or then[target] >= now[source] or not rows[source]:
            return moves
        moves.append((rows[source].pop(), target))
        batch[source] -= 1
        batch[target] += 1


def _next_steps(state: SampleTable) -> np.ndarray:
    """Seconds of a step with one sample more."""
    return _steps(state, state.batch() + 1)


def _steps(state: SampleTable, batch: np.ndarray) -> np.ndarray:
    return np.array(
        [
            table[count] if count <= slots else NO_DEADLINE
            for table, count, slots in zip(state.tables, batch, state.slots, strict=True)
        ]
    )
