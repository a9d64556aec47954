"""Rows: samples with their places in the log, and their scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.admission import tells_nothing
from schemas.identity import round_of
from schemas.messages import Sample


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a sample: one entry per drawn token. None: the loss does not need it."""

    reference: np.ndarray | None = None  # logprobs under the reference policy
    before: np.ndarray | None = None  # logprobs under the weights that the step or iteration begins with
    values: np.ndarray | None = None  # the return that the critic expects from here on


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A sample, its place in the log, and its scores."""

    sample: Sample
    partition: int
    offset: int
    scores: Scores = Scores()

    @property
    def size(self) -> int:
        """Number of tokens of prompt and answer."""
        return int(self.sample.prompt_tokens.size + self.sample.tokens.size)


def says_nothing(samples: Iterable[Sample]) -> bool:
    """Return whether a group's rewards are all alike."""
    return tells_nothing(math.nan if sample.reward_error else sample.reward for sample in samples)


def drawn_again(rows: Iterable[TrainingRow], most_draws: int) -> set[int]:
    """Return the groups in whose place others are drawn, since their rewards are all alike."""
    samples: dict[int, list[Sample]] = {}
    for row in rows:
        if round_of(row.sample.group) < most_draws:
            samples.setdefault(row.sample.group, []).append(row.sample)
    return {group for group, members in samples.items() if says_nothing(members)}


def groups_of(rows: Sequence[TrainingRow]) -> list[list[int]]:
    """Return the indexes of each group's rows in a fixed order, since the bits of a sum depend on order."""
    groups: dict[int, list[int]] = {}
    for number in sorted(range(len(rows)), key=lambda n: (rows[n].sample.group, rows[n].sample.index)):
        groups.setdefault(rows[number].sample.group, []).append(number)
    return list(groups.values())
