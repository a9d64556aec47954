"""The learner `fsdp`: the ranks share out weights, gradients and the optimizer's state, see `sharded.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumers.learners.settings import LearnerWithoutStages
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    from consumers.learners.sharded import ShardedLearner


class FsdpSettings(LearnerWithoutStages):
    """Settings of the learner fsdp."""

    @property
    def sums_exactly(self) -> bool:
        return self.exact_sums is not False

    @property
    def trains_adapters(self) -> bool:
        return True

    @property
    def needs_ranks(self) -> bool:
        return True

    @property
    def exact_recipe(self) -> object:
        return ["exact", self.learner]  # a norm that is cut off is added up otherwise than by learner torch

    def make(self, model: str, spec: RunSpec) -> ShardedLearner:
        from consumers.learners.sharded import ShardedLearner

        return ShardedLearner(model, spec)
