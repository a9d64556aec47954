"""Choose the learner that the run file asks for."""

from __future__ import annotations

import logging

from consumers.learners.learner import Learner, LocalLearner, TorchLearner
from consumers.ranks.ranked_learner import RankedLearner
from schemas.runspec import RunSpec


def local_learner(model: str, spec: RunSpec) -> LocalLearner:
    """Return the learner of one rank."""
    if spec.trainer.learner == "torch":
        return TorchLearner(model, spec)
    from consumers.learners.deepspeed_learner import DeepSpeedLearner

    return DeepSpeedLearner(model, spec)


def learner_of(model: str, spec: RunSpec, *, run: str, log: logging.Logger) -> Learner:
    """Return the trainer's learner, over as many ranks as the run file says."""
    if spec.trainer.ranks == 1 and spec.trainer.learner == "torch":
        return TorchLearner(model, spec)
    return RankedLearner(model, spec, local_learner, run=run, log=log)
