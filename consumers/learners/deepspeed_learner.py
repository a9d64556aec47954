"""The learner `deepspeed`: the ranks share out the model or the optimizer's state, see `zero.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from consumers.learners.settings import LearnerSettings
from schemas.runspec import RunSpec

if TYPE_CHECKING:
    from consumers.learners.zero import DeepSpeedLearner


class DeepSpeedSettings(LearnerSettings):
    """Settings of the learner deepspeed."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="The things that the ranks share out. 0: nothing. 1: the optimizer's state. "
        "2: gradients as well. 3: weights as well. A higher stage takes less memory and sends more.",
    )

    @model_validator(mode="after")
    def _sums_fit(self) -> DeepSpeedSettings:
        if self.exact_sums:
            raise ValueError(
                "exact_sums needs learner torch or fsdp: DeepSpeed adds gradients as floats, among ranks "
                "too. Leave exact_sums out, or set trainer.learner to torch or fsdp"
            )
        return self

    @model_validator(mode="after")
    def _offload_fits(self) -> DeepSpeedSettings:
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError(
                "offload_optimizer needs zero_stage 1, 2 or 3 with learner deepspeed: at stage 0 it can't "
                "move the optimizer's state. Set trainer.zero_stage to 1"
            )
        return self

    @property
    def needs_ranks(self) -> bool:
        return True

    @property
    def needs_deepspeed(self) -> bool:
        return True

    @property
    def rank_sums(self) -> list[object]:
        return [*super().rank_sums, self.zero_stage]

    def make(self, model: str, spec: RunSpec) -> DeepSpeedLearner:
        from consumers.learners.zero import DeepSpeedLearner

        return DeepSpeedLearner(model, spec, self.zero_stage)
