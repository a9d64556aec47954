"""The paper's three systems: seconds of an iteration by their stages, and Algorithm 1's split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flows.planning.hardware import Hardware
from tests.bench._paper_stages import Stages

UNIT = 4  # GPUs: the grain of splits


@dataclass(frozen=True)
class Split:
    """GPUs of both sides, and their seconds."""

    generating: int
    training: int
    generation_s: float
    training_s: float

    @property
    def slower_s(self) -> float:
        """What Algorithm 1 keeps small."""
        return max(self.generation_s, self.training_s)


def split_of(stages: Stages, hardware: Hardware, gpus: int, generating: int, longest: float) -> Split:
    """Return a split with its seconds, with the ranker's dispatch."""
    training = gpus - generating
    return Split(
        generating, training, stages.generation_s(hardware, generating, longest, "ranker"),
        stages.training_s(hardware, training, longest),
    )  # fmt: skip


def algorithm1(stages: Stages, hardware: Hardware, gpus: int, longest: float) -> Split:
    """Return the paper's split for one site."""
    splits = (split_of(stages, hardware, gpus, generating, longest) for generating in range(UNIT, gpus, UNIT))
    return min(splits, key=lambda split: split.slower_s)


def colocated_s(stages: Stages, hardware: Hardware, gpus: int, longest: float, policy: str) -> float:
    """All GPUs generate, then all train; weights change their layout in between."""
    step_s, publish_s = stages.around_s(hardware, gpus)
    generation_s = stages.generation_s(hardware, gpus, longest, policy)
    return generation_s + stages.training_s(hardware, gpus, longest) + step_s + publish_s


def sync_s(stages: Stages, hardware: Hardware, split: Split, longest: float) -> float:
    """Samples are trained as they come; then come the optimizer's step and the way of the weights."""
    all_ends = stages.generated(hardware, split.generating, longest, "ranker")
    assert all_ends is not None, "a split that cannot generate was chosen"
    seconds = []
    for seed, ends in zip(stages.seeds, all_ends, strict=True):
        each = stages.training(hardware, split.training, longest, seed)
        assert each is not None, "a split that cannot train was chosen"
        now = 0.0
        for sample in np.argsort(ends, kind="stable").tolist():
            now = max(now, float(ends[sample])) + float(each[sample])
        seconds.append(now)
    return float(np.mean(seconds)) + sum(stages.around_s(hardware, split.training))


def async_s(stages: Stages, hardware: Hardware, split: Split) -> float:
    """Both sides are busy all the time, one batch apart, and the weights' way is beside them."""
    return max(split.generation_s, split.training_s + stages.around_s(hardware, split.training)[0])


def grown(
    stages: Stages, hardware: Hardware, split: Split, unit: int, longest: list[float]
) -> list[tuple[int, float, float]]:
    """Return by iteration: GPUs that generate, the gap δ, and the gain δ' of one more unit.

    `longest`: of each iteration. A unit is added where δ >= δ'.
    """
    gpus, found = split.generating, []
    for tokens in longest:
        now_s = stages.generation_s(hardware, gpus, tokens, "ranker")
        gap = now_s - stages.training_s(hardware, split.training, tokens)
        gain = now_s - stages.generation_s(hardware, gpus + unit, tokens, "ranker")
        found.append((gpus, gap, gain))
        if gap >= gain > 0 and math.isfinite(gap):
            gpus += unit
    return found
