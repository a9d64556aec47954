"""The outcome of a simulated run: when steps ended, and where the time of each side went."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

DRAWING = ("drawing", "drawing the tail")
GENERATOR_CAUSES = (
    *DRAWING,  # tokens, with many slots in use or more jobs to come; or of the last few samples
    "prefilling",
    "installing",  # new weights
    "waiting for jobs",  # nothing that may be drawn is admitted, or others draw it
    "waiting for weights",  # that its jobs need
    "waiting for its turn",  # colocated: the learner is at work
    "away",  # dead, starting, or not there any more
)
LEARNER_CAUSES = (
    "training",
    "stepping",  # the optimizer
    "waiting for samples",
    "waiting for weights",  # barrier: until they are everywhere
    "waiting for its turn",  # colocated: the engines are at work
)
_AROUND = 1  # iterations at the beginning and the end that are not steady, besides the staleness


@dataclass(frozen=True)
class SimulatedStep:
    """An iteration as it came out. Figures of both sides are sums from the beginning up to its end."""

    ended_at: float
    groups: list[int]
    staleness: list[int]  # of each sample: iterations between its oldest weights and those trained
    tokens: int  # of its answers
    learned: Mapping[str, float]  # seconds of the learner by cause
    generated: Mapping[str, float]  # seconds of all generators by cause
    idle_slots_s: float  # slot seconds without a sample, of the generators that are there
    made: tuple[int, int]  # samples and tokens generated
    generators: int  # that are there


@dataclass(frozen=True)
class SimulatedSpan:
    """A bar of a picture: somebody does one thing for a while."""

    lane: str
    kind: str
    begin: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class SimulatedChange:
    """A change of the number of generators, or with `dry` a recommendation of one."""

    at_s: float
    iteration: int
    gen_s: float
    train_s: float
    gain_s: float
    before: int
    after: int
    dry: bool
    reason: str


@dataclass
class Simulation:
    """A simulated run."""

    group_size: int
    lookahead: float
    steps: list[SimulatedStep] = field(default_factory=list)
    link_bytes: dict[str, int] = field(default_factory=dict)  # by site, over its link
    link_s: dict[str, float] = field(default_factory=dict)  # for which it was busy
    generators: float = 0.0  # how many were there, on the average
    cost: float = 0.0  # of generators and learner, in the unit of prices
    changes: list[SimulatedChange] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)  # by those who keep the balance, and when
    handed_over: int = 0  # samples that generators had begun when they left, and that others went on with
    moves: int = 0
    moved_tokens: int = 0  # that were prefilled anew for that
    preempted: int = 0  # times that a machine with generators was taken away
    drawn_again: int = 0  # samples whose generator had died
    events: int = 0
    spans: list[SimulatedSpan] = field(default_factory=list)

    @property
    def ended_at(self) -> float:
        """When the last step was done."""
        return self.steps[-1].ended_at

    @property
    def samples(self) -> int:
        """How many samples were trained."""
        return sum(len(step.groups) for step in self.steps) * self.group_size

    @property
    def tokens(self) -> int:
        """How many tokens their answers have."""
        return sum(step.tokens for step in self.steps)

    def steady(self) -> tuple[int, int]:
        """Return the iterations between whose ends a run is steady: the first one, and the last.

        Before the first, slots fill, and after the last nothing is admitted any more. -1: the beginning.
        """
        around = _AROUND + math.ceil(self.lookahead)
        last = len(self.steps) - 1
        if self.lookahead == 0 or last <= 2 * around:
            return (-1, last) if self.lookahead == 0 else (min(around, last - 1), last)
        return around, last - around

    @property
    def samples_per_s(self) -> float:
        """Trained samples a second, in the steady part of the run."""
        first, last = self.steady()
        groups = sum(len(step.groups) for step in self.steps[first + 1 : last + 1])
        return groups * self.group_size / self.between(first, last)

    @property
    def step_s(self) -> float:
        """Seconds of an iteration, in the steady part of the run."""
        first, last = self.steady()
        return self.between(first, last) / (last - first)

    def between(self, first: int, last: int) -> float:
        """Return the seconds between the ends of two iterations; -1: the beginning."""
        return self.steps[last].ended_at - (self.steps[first].ended_at if first >= 0 else 0.0)

    def generator_shares(self) -> dict[str, float]:
        """Return the share of the generators' time by cause, in the steady part."""
        return self._shares([step.generated for step in self.steps])

    def learner_shares(self) -> dict[str, float]:
        """Return the share of the learner's time by cause, in the steady part."""
        return self._shares([step.learned for step in self.steps])

    def _shares(self, sums: list[Mapping[str, float]]) -> dict[str, float]:
        first, last = self.steady()
        before = sums[first] if first >= 0 else dict.fromkeys(sums[last], 0.0)
        spent = {cause: seconds - before[cause] for cause, seconds in sums[last].items()}
        total = sum(spent.values()) or 1.0
        return {cause: seconds / total for cause, seconds in spent.items()}

    def staleness(self) -> tuple[float, int]:
        """Return the mean and the greatest staleness of trained samples, in the steady part."""
        first, last = self.steady()
        ages = np.concatenate([step.staleness for step in self.steps[first + 1 : last + 1]])
        return float(ages.mean()), int(ages.max())

    @property
    def cost_per_1000(self) -> float:
        """The cost of 1,000 trained samples, in the unit of prices, over the steady part."""
        return self.cost / self.ended_at / self.samples_per_s * 1000
