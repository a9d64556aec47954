"""The paper's three systems: seconds of an iteration by their stages, and Algorithm 1's split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flows.balancing.balancer import Balancer, Verdict
from flows.planning.hardware import Hardware
from flows.planning.two_stage_split import split_of_one_site
from schemas.balancing import BalanceSection
from tests.bench._paper_stages import Stages

UNIT = 4  # GPUs: the grain of splits
_MOST_ADDED = 16  # units


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
    found = split_of_one_site(
        gpus // UNIT,
        lambda units: stages.generation_s(hardware, units * UNIT, longest, "ranker"),
        lambda units: stages.training_s(hardware, units * UNIT, longest),
    )
    return split_of(stages, hardware, gpus, found.generating * UNIT, longest)


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
) -> list[tuple[int, Verdict]]:
    """Return by iteration the GPUs that generate, and what the balancer of a run says of their stages.

    `longest`: of each iteration. `unit`: GPUs that are added or removed as one. It has a run file's defaults,
    and begins with the split's GPUs, which are the fewest.
    """
    first = max(1, split.generating // unit)
    balancer = Balancer(BalanceSection(least=first, most=first + _MOST_ADDED))
    units, found = first, []
    for iteration, tokens in enumerate(longest):
        gpus = split.generating + (units - first) * unit
        now_s, more_s, fewer_s = (
            stages.generation_s(hardware, many, tokens, "ranker") for many in (gpus, gpus + unit, gpus - unit)
        )
        train_s = stages.training_s(hardware, split.training, tokens)
        verdict = balancer.observe(iteration, now_s, train_s, units, more_s=more_s, fewer_s=fewer_s)
        found.append((gpus, verdict))
        units = verdict.after
    return found
