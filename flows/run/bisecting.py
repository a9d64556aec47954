"""Finds the first step of a run for which a condition holds.

    the ledger says it ──► one pass over the ledger, no replay
    only a replay says it ──► a step in the middle is taken again, then one in the middle of what is left

A replay begins at a checkpoint, so each probe takes the steps from there on again. A condition that a replay
decides must hold from its first step on, or another step may be found: the first and the last step are probed
first, and if the last one does not have it, all that can be said is that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from consumers.replay import Again, Replayed, newest_step_of
from consumers.steps.ledger import steps_in_ledger
from flows.run.predicates import APART, Predicate, Values
from infra.run_handle import RunHandle
from schemas.messages import StepRecord

Probed = Callable[[int, bool], None]  # a step that was taken again, and whether the condition holds


@dataclass(frozen=True)
class Bisected:
    """The first step for which a condition holds."""

    step: int | None  # None: for no step that was looked at
    values: Values  # of that step
    replays: int
    looked_at: int  # steps that the ledger has


def bisect_run(again: Again, handle: RunHandle, when: Predicate, probed: Probed) -> Bisected:
    """Find the first step for which a condition holds."""
    if not when.replays:
        count = 0
        for record in steps_in_ledger(handle):
            count += 1
            if when.holds(values := values_of(record)):
                return Bisected(record.step, values, 0, count)
        if not count:
            newest_step_of(handle)  # raises, as there is none
        return Bisected(None, {}, 0, count)
    first = next((record.step for record in steps_in_ledger(handle)), 0)
    return _by_replays(again, when, first, again.newest(), probed)


def _by_replays(again: Again, when: Predicate, first: int, last: int, probed: Probed) -> Bisected:
    replays, found = 0, dict[int, Values]()

    def holds(step: int) -> bool:
        nonlocal replays
        replays += 1
        values = values_of_replay(again.step(step))
        held = when.holds(values)
        probed(step, held)
        if held:
            found[step] = values
        return held

    looked = last - first + 1
    if holds(first):
        return Bisected(first, found[first], replays, looked)
    if last == first or not holds(last):
        return Bisected(None, {}, replays, looked)
    low, high = first, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return Bisected(high, found[high], replays, looked)


def values_of(record: StepRecord) -> dict[str, float]:
    """Return the values of a step that the ledger has."""
    values = dict(record.metrics)
    values |= {
        "step": float(record.step),
        "iteration": float(record.iteration),
        "version": float(record.version_out),
    }
    numbers = [*record.metrics.values(), *record.losses.tolist()]
    values["nan"] = float(not all(map(math.isfinite, numbers)))
    return values


def values_of_replay(found: Replayed) -> dict[str, float]:
    """Return the values of a step, with how far each stage of its replay is apart."""
    apart = {f"{APART}{one.stage.name.lower()}": one.apart for one in found.stages if one.equal is not None}
    return values_of(found.record) | apart | {"different": float(not found.equal)}
