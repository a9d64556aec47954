"""The learner `torch`: each rank holds the whole model and the optimizer's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumers.learners.settings import LearnerWithoutStages
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    from consumers.learners.learner import TorchLearner


class TorchSettings(LearnerWithoutStages):
    """Settings of the learner torch."""

    @property
    def sums_exactly(self) -> bool:
        return self.exact_sums is not False

    @property
    def trains_adapters(self) -> bool:
        return True

    @property
    def rank_sums(self) -> list[object]:
        return [*super().rank_sums, self.zero_stage]  # as ledgers have always had it

    def make(self, model: str, spec: RunSpec) -> TorchLearner:
        from consumers.learners.learner import TorchLearner

        return TorchLearner(model, spec)
