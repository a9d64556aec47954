"""Choose the learner that the run file asks for."""

from __future__ import annotations

import logging

from consumers.learners.learner import Learner, LocalLearner
from consumers.learners.settings import LearnerSettings
from consumers.ranks.ranked_learner import RankedLearner
from consumers.ranks.trainer_door import TrainerDoor
from schemas.runspec import RunSpec


def local_learner(model: str, spec: RunSpec) -> LocalLearner:
    """Return the learner of one rank. Its spec has the run's own code, wherever it came from."""
    spec = spec.with_code("loss", "trainer")
    assert isinstance(spec.trainer, LearnerSettings)
    return spec.trainer.make(model, spec)


def learner_of(
    model: str, spec: RunSpec, *, run: str, log: logging.Logger, door: TrainerDoor | None = None
) -> Learner:
    """Return the trainer's learner, over as many ranks as the run file says.

    `door`: where ranks of other machines come in. Without it, as for a replay, all are on this machine.
    """
    spec = spec.with_code("loss", "trainer")
    if spec.trainer.ranks == 1 and not spec.trainer.needs_ranks:
        return local_learner(model, spec)
    return RankedLearner(model, spec, local_learner, run=run, log=log, door=door)
