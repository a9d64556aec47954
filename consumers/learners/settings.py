"""The settings of a learner, which make the learner. Reading them does not load torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from schemas.runspec import RunSpec
from schemas.training import TrainerSection

if TYPE_CHECKING:
    from consumers.learners.learner import LocalLearner


class LearnerSettings(TrainerSection, ABC):
    """The settings of a learner. A file that adds a learner extends this class."""

    @abstractmethod
    def make(self, model: str, spec: RunSpec) -> LocalLearner:
        """Return the learner of one rank, with the model in a folder."""


class LearnerWithoutStages(LearnerSettings):
    """The settings of a learner that has one way to share out a model among ranks, or none."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="Without effect here; a run file may keep it while it tries another learner.",
    )
