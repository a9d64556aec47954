"""A sample on its way through the trainer: where it stands in the log, and what models say of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.admission import tells_nothing
from schemas.messages import Sample


@dataclass(frozen=True, slots=True)
class Scores:
    """What models that a step does not change say of each token; what the loss does not need is None."""

    reference: np.ndarray | None = None  # logprobs under the reference policy
    before: np.ndarray | None = None  # under the weights that the step or iteration begins with
    values: np.ndarray | None = None  # what the critic expects from here on


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sample and where it stands in the log."""

    sample: Sample
    partition: int
    offset: int
    scores: Scores = Scores()

    @property
    def size(self) -> int:
        """Tokens of prompt and answer."""
        return int(self.sample.prompt_tokens.size + self.sample.tokens.size)


def says_nothing(samples: Iterable[Sample]) -> bool:
    """Whether a group's rewards are all alike."""
    return tells_nothing(math.nan if sample.reward_error else sample.reward for sample in samples)


def groups_of(rows: Sequence[TrainingRow]) -> list[list[int]]:
    """The rows of each group, by index: a sum's bits depend on the order."""
    groups: dict[int, list[int]] = {}
    for number in sorted(range(len(rows)), key=lambda n: (rows[n].sample.group, rows[n].sample.index)):
        groups.setdefault(rows[number].sample.group, []).append(number)
    return list(groups.values())
