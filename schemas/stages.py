"""The stages of an optimizer step, in order, and how far two machines may be apart in each.

reward → advantage → scores → micro-batches → logprobs → loss → gradient → norm → optimizer → weights
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    """A stage; its number is its place in the ledger's arrays, and never changes."""

    REWARD = 0
    ADVANTAGE = 1
    SCORES = 2
    MICRO_BATCHES = 3
    LOGPROBS = 4
    LOSS = 5
    GRADIENT = 6
    NORM = 7
    OPTIMIZER = 8
    WEIGHTS = 9

    @property
    def title(self) -> str:
        """The stage's name, for people."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class StageMeaning:
    """The purpose of a stage, and the unit in which two results of it are apart."""

    computes: str
    unit: str


MEANINGS: dict[Stage, StageMeaning] = {
    Stage.REWARD: StageMeaning("the rewards of the samples", "largest difference of a reward"),
    Stage.ADVANTAGE: StageMeaning("the advantages, from the rewards", "largest difference of an advantage"),
    Stage.SCORES: StageMeaning(
        "log-probabilities and values by the reference, the critic and earlier weights",
        "largest difference of a sample's mean score",
    ),
    Stage.MICRO_BATCHES: StageMeaning("which samples go through the model together", "samples that differ"),
    Stage.LOGPROBS: StageMeaning(
        "the log-probabilities of the drawn tokens", "largest difference of a sample's mean, in nats"
    ),
    Stage.LOSS: StageMeaning(
        "the loss of each micro-batch", "largest difference, as a share of the largest loss"
    ),
    Stage.GRADIENT: StageMeaning("the mean gradient of all micro-batches", "share of the gradient's length"),
    Stage.NORM: StageMeaning("the gradient's norm, by which it is clipped", "share of the norm"),
    Stage.OPTIMIZER: StageMeaning("the optimizer's moments after the step", "share of their length"),
    Stage.WEIGHTS: StageMeaning("the weights after the step", "in units of the learning rate, a weight"),
}

# Two machines add the same numbers in other orders, and one rounds products that the other does not. The
# model multiplies such errors; in 16 bits they are larger from the start. AdamW divides by the gradient's own
# size, so that a weight whose gradient is nothing but rounding errors may move by a whole learning rate.
_FLOAT32 = {
    Stage.ADVANTAGE: 1e-5, Stage.SCORES: 1e-3, Stage.LOGPROBS: 1e-3, Stage.LOSS: 1e-2,
    Stage.GRADIENT: 1e-2, Stage.NORM: 1e-2, Stage.OPTIMIZER: 1e-2, Stage.WEIGHTS: 0.25,
}  # fmt: skip
_SIXTEEN_BITS = _FLOAT32 | {
    Stage.SCORES: 0.05, Stage.LOGPROBS: 0.05, Stage.LOSS: 0.2, Stage.GRADIENT: 0.2, Stage.NORM: 0.2,
    Stage.OPTIMIZER: 0.2, Stage.WEIGHTS: 1.0,
}  # fmt: skip


def tolerances(dtype: str) -> list[float]:
    """Return for each stage how far another kind of machine may be apart, for a run in this dtype."""
    chosen = _FLOAT32 if dtype == "float32" else _SIXTEEN_BITS
    return [chosen.get(stage, 0.0) for stage in Stage]
