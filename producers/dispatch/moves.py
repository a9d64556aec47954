"""Finds running samples that should move to other generators: where the gain should exceed the prefill.

Either single samples move: those most often the last to end go to where they run faster. Or many move at
once: batches are levelled, so that a generator that has run out takes its share. Moves are only made if the
expected makespan falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from producers.dispatch.board import NO_DEADLINE
from producers.dispatch.state import LONGEST_FIRST, SampleTable, Setting

MOST_MOVES = 4  # of single samples
_LEAST_GAIN = 0.0005  # share of the makespan that a single move must gain
_LEAST_LEVELLED = 0.005  # share that moving many must gain

Move = tuple[int, int]  # a sample's row, and its new generator


def find_moves(state: SampleTable, draws: np.ndarray, setting: Setting) -> tuple[list[Move], Setting, float]:
    """Return the moves, the best setting with them, and the expected makespan then.

    Applies them to `state`.
    """
    ends = state.expected(draws, setting)
    moves, setting, ends = _levelled(state, draws, setting, ends)
    for _ in range(MOST_MOVES):
        best = _best_single(state, draws, setting, ends)
        if best is None:
            break
        ends, (row, target) = best
        state.move(row, target)
        moves.append((row, target))
    return moves, setting, ends


def _best_single(
    state: SampleTable, draws: np.ndarray, setting: Setting, ends: float
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
            stall_s = state.stalls[target]
            state.move(row, target)
            there = state.expected(draws, setting)
            state.where[row], state.stalls[target] = source, stall_s
            if there < ends * (1 - _LEAST_GAIN) and (found is None or there < found[0]):
                found = there, (row, target)
    return found


def _levelled(
    state: SampleTable, draws: np.ndarray, setting: Setting, ends: float
) -> tuple[list[Move], Setting, float]:
    """Try to move many samples: those with the fewest tokens, which cost least, or the most to come."""
    where, stalls = state.where.copy(), state.stalls.copy()
    left = np.median(state.beliefs, axis=1) - state.tokens
    found: tuple[float, Setting, Sequence[Move]] = ends * (1 - _LEAST_LEVELLED), setting, ()
    for preferred in (-state.tokens, left):
        moves = _level(state, preferred)
        for count in sorted({len(moves), len(moves) // 3} - {0}):
            for row, target in moves[:count]:
                state.move(row, target)
            for one in {setting, LONGEST_FIRST} if count == len(moves) else {setting}:
                there = state.expected(draws, one)
                if there < found[0]:
                    found = there, one, moves[:count]
            state.where[:], state.stalls[:] = where, stalls
    if not found[2]:
        return [], setting, ends
    for row, target in found[2]:
        state.move(row, target)
    return list(found[2]), found[1], found[0]


def _level(state: SampleTable, preferred: np.ndarray) -> list[Move]:
    """Return moves from the generator with the slowest step to the one with the fastest, until level."""
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
    """Return the seconds of each generator's step with one more sample."""
    return _steps(state, state.batch() + 1)


def _steps(state: SampleTable, batch: np.ndarray) -> np.ndarray:
    return np.array(
        [
            table[count] if count <= slots else NO_DEADLINE
            for table, count, slots in zip(state.tables, batch, state.slots, strict=True)
        ]
    )
