"""The paper's Algorithm 1: how many machines generate and how many train, exactly as it is printed there.

It knows one price and one kind of machine, times without spread, and takes a step for as long as its slower
side. `flows.planning.allocating` is ours; this is here to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

StageTime = Callable[[int], float]  # of one iteration, by the number of machines that the stage has


@dataclass(frozen=True)
class TwoStageSplit:
    """How many machines generate, how many train, and how long the slower of them takes."""

    generating: int
    training: int
    step_s: float


def split_of_one_site(machines: int, generating_s: StageTime, training_s: StageTime) -> TwoStageSplit:
    """Return the best split of at most so many machines of one site."""
    if machines < 2:
        raise ValueError(f"a split takes two machines at least, not {machines}")
    best = TwoStageSplit(0, 0, float("inf"))
    for generating in range(1, machines):
        for training in range(1, machines - generating + 1):
            step_s = max(generating_s(generating), training_s(training))
            if step_s < best.step_s:
                best = TwoStageSplit(generating, training, step_s)
    return best


def split_of_two_sites(
    most_generating: int, most_training: int, generating_s: StageTime, training_s: StageTime
) -> TwoStageSplit:
    """Return the split of machines at two sites: the slower stage keeps all of its own, the other gives back.

    The faster stage keeps as many as come nearest to the slower stage's time, above it or below.
    """
    if most_generating < 1 or most_training < 1:
        raise ValueError("each site has one machine at least")
    slowest_generating, slowest_training = generating_s(most_generating), training_s(most_training)
    if slowest_generating < slowest_training:
        generating = min(
            range(1, most_generating + 1), key=lambda many: abs(generating_s(many) - slowest_training)
        )
        training = most_training
    else:
        generating = most_generating
        training = min(
            range(1, most_training + 1), key=lambda many: abs(training_s(many) - slowest_generating)
        )
    return TwoStageSplit(generating, training, max(generating_s(generating), training_s(training)))
