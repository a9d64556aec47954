"""The settings of a learner, which make the learner. Reading them does not load torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from schemas.runspec import RunSpec
from schemas.training import TrainerSection

if TYPE_CHECKING:
    from consumers.learners.learner import LocalLearner


class LearnerSettings(TrainerSection, ABC):
    """The settings of a learner. A file that adds a learner extends this class."""

    @abstractmethod
    def make(self, model: str, spec: RunSpec) -> LocalLearner:
        """Return the learner of one rank, with the model in a folder."""
